"""The state that a checkpoint holds.

of a model    state, tensors, fill, ties
optimizers    optimizers, optimizer_loading, optimizer_groups, numbered
on the ranks  per_rank, replicas
on loading    differences
"""
