"""Optimizers on sharded parameters.

the step         stepping, which chooses; local_step, muon_step, whole_step, plain_step;
                 host_state, for state in host memory
parts of these   kernels, step_hooks, parts; division, which the plan asks too
around it        rebind, clip, loss_scale
"""
