"""Descriptions of models: module tree, FSDP units, weights; torch is loaded only to build a model.

a description  sources, from any text that names a model; describe, tree
by its name    gpt, builtin, open_models; weights, by its files; comment, the name in a configuration
built          child, a process in which probe builds it; live, packed, facts, families, prepared; gpt_module
its units      cut, blocks; several, for more than one model; adapters, of LoRA, in place of the whole model
"""
