"""Optimizers on sharded parameters.

before a step   rebind, to a model's present parameters; kernels, torch's fused ones or others
gradients       clip, loss_scale; parts, whole ones that a script gives
a step          plain_step, as it is; local_step, on this rank's parts
"""
