"""Optimizers on sharded parameters.

the step         stepping, which chooses; local_step, muon_step, whole_step, plain_step
parts of these   kernels, step_hooks, parts; division, which the plan asks too
around it        rebind, clip, loss_scale
"""
