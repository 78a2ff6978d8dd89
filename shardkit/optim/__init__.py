"""Optimizers on sharded parameters: rebinding, stepping, clipping, loss scaling."""
