"""Makes a model parallel: units, sharding or replication, dtypes, and initial values.

the order of steps  parallelize; unfit, models that are refused
what is sharded     units, mesh, shared_memory, init, weight_files
by FSDP2            the folder fsdp
by DDP, by XLA      the folder ddp; xla
sequences           the folder context_parallel: ranks that share each sequence
gradients           gradient_sync, taken_gradients, hooks, mixed_losses, offloaded_gradients
in blocks           activation, changed_buffers, offload, float8, precision, cast_outputs
parameters          parameters, original_parameters
sharded tensors     the folder tensors: what a script may do with them
"""
