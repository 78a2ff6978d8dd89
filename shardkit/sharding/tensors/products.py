"""Products of plain tensors with sharded ones, such as samples with the weights of a layer, outside of its unit.

    average.load_state_dict(model.state_dict(), assign=True); average(x)    a plain copy that holds sharded weights
    features @ model.prototypes.weight.T, F.embedding(ids, table)           in evaluation
    p.grad.copy_(preconditioner @ p.grad)

Every rank computes with its own plain tensors and the whole weights, as in a forward of their unit, and the result is
plain. Weights that need a gradient are refused: that of each rank would be of its own samples.
"""

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from shardkit.distributed import named_barrier
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.settled import as_plain

_LINEAR = operators(
    "mm addmm bmm baddbmm embedding convolution convolution_backward native_layer_norm native_layer_norm_backward "
    "native_group_norm native_group_norm_backward"
)
"""The gradients of plain tensors are such products, too."""
_OTHERS = operators("mv addmv addr _embedding_bag_forward_only _cdist_forward _euclidean_dist _trilinear")
_COMPOSITE = operators("linear matmul einsum bilinear cdist conv1d conv2d conv3d tensordot layer_norm group_norm")
"""Which torch takes apart before, except in inference mode."""


@cache
def install() -> None:
    """Makes them work on whole weights. Has an effect once per process."""
    handle((*_LINEAR, *_OTHERS, *_COMPOSITE), _product)


def _product(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where it has plain tensors, unless they count as replicated anyway: see `settled`."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    if all(map(is_dtensor, tensors)) or DTensor._op_dispatcher._allow_implicit_replication:
        return as_torch_does(operator, args, kwargs)
    needing = [one for one in tensors if one.requires_grad and (is_dtensor(one) or operator not in _LINEAR)]
    if torch.is_grad_enabled() and needing:
        shape = next(tuple(one.shape) for one in tensors if is_dtensor(one))
        raise UsageError(
            "sharded tensor: its product with plain tensors cannot be trained, since each rank would have the gradient "
            f"of its own samples (got one of shape {shape} in {operator.name()}); call the module that has the "
            "parameter, model.head(x), or take parameter.full_tensor() before. Where the forward of one module reads a "
            "parameter of another, both must be in one unit: fsdp_auto_wrap_policy: NO_WRAP, or the first one's class "
            "in fsdp_transformer_layer_cls_to_wrap."
        )
    named_barrier.meet_at_first(operator.name(), UsageError)
    return operator(*tree_map(as_plain, args), **tree_map(as_plain, kwargs))
