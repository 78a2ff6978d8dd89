"""Ranks and their process group: startup, agreement, and collectives on tensors.

the start       process, rank_store, same_config; accelerators, affinity, device_list; xla, for PyTorch/XLA
agreement       control, named_barrier, background_agreement
collectives     collectives, gradients, buffers; nested, structures of tensors
of a model      modules, without torch's wrappers; tensors, the parts of sharded ones; host_memory; custom_state, its
                own loading code
random numbers  seed, random_state
for a launcher  progress, long_work
"""
