"""Makes a model parallel: units, sharding or replication, dtypes, and initial values.

the order of steps  parallelize
what is sharded     units, mesh, shared_memory, init, weight_files
by FSDP2            fsdp, fsdp_unit, fsdp_entry, fsdp_unused, fsdp_recomputation, fsdp_internals, fsdp_recovery,
                    fsdp_grad, outputs, trace
by DDP, by XLA      ddp, ddp_hooks, ddp_names; xla
gradients           gradient_sync, taken_gradients, hooks, mixed_losses, offloaded_gradients
in blocks           activation, changed_buffers, offload, float8, precision
parameters          parameters, sharded_parameter, original_parameters, assigned_data, pickled_parts
sharded tensors     dtensor_operators, and operators that differ from torch's:
                    composite_operators, copied_parts, fused_steps, in_place, into_plain, numbers_of_tensors,
                    plain_operands, random_values, reductions, reshaped, settled,
                    torch_collectives, whole_operators
"""
