"""Descriptions of models: module tree, FSDP units, weights; torch is loaded only to build a model."""
