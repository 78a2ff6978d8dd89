"""Models sharded by FSDP2: in any loop they behave like plain modules.

Only this folder uses private parts of FSDP2, and for gradients that wait `gradient_sync`, `taken_gradients` and
`offloaded_gradients` beside it.

a model             shard_model
a unit              unit_state, entries, written; in backward: outputs, autograd_grad, unused_parameters, recomputation
its dtypes          messages
after an error      recovery
a deep copy         copies
whole for a while   unsharded
ranks that differ   trace
what torch keeps    internals
"""
