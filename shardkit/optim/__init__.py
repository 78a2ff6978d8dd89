"""Optimizers on sharded parameters: rebinding, the step, clipping, loss scaling."""
