"""Operators that need the whole of a sharded tensor: elements that tensors choose, and operators that DTensor lacks.

    embed.weight[is_new], p[p > 1] = 1, p.grad[ids] = 0      textual inversion, new tokens, frozen rows
    torch.zeros_like(p).flatten().scatter_(0, largest, 1.0)  gradients made sparse
    torch.renorm(p, 2, 0, 1.0), p.tril_(), p.unfold(0, 2, 1)
    torch.cdist(p, p), torch.unique(p), torch.fake_quantize_per_tensor_affine(p, ...)

torch refuses to mix the two kinds of tensors, cannot tell how many elements a mask chooses, and has no in-place
operator for rows of a sharded dim; its `scatter_add_` leaves the tensor with another shape, without a word (2.13). Here
the operator works on the whole tensor, of which each rank keeps its part. Plain tensors count as equal on all ranks,
and what is read is a copy that all of them get. A value that is pending is reduced first, as in the gradient of
`(p.T @ p).norm()`. (Checked on torch 2.11 to 2.15.)
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import is_dtensor
from shardkit.sharding.tensors import copied_parts
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.into_plain import into_plain
from shardkit.sharding.tensors.plain_operands import refuse_different_indices
from shardkit.sharding.tensors.settled import in_place_of_whole, is_pending, of_whole, on_one_device, settle_in_place

_aten = torch.ops.aten
_MASKS = (_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor)
"""With a sharded mask they need no whole tensor."""
_FINDING = "_propagate_op_sharding_dispatch_slow_path"
"""The dispatcher's method that finds a layout for an operator; it may return the operator's result instead."""
_READS = operators(
    "index.Tensor index_select index_put _unsafe_index_put masked_select masked_scatter nonzero take gather "
    "scatter.src scatter.value scatter_add put scatter_reduce.two index_reduce isin.Tensor_Tensor renorm unfold histc "
    "histogram.bin_ct bincount index_fill.int_Scalar index_fill.int_Tensor bucketize.Tensor searchsorted.Tensor "
    "fake_quantize_per_channel_affine_cachemask"
)
_WRITES = _MASKS + operators(
    "index_put_ _index_put_impl_ index_copy_ index_add_ index_fill_.int_Scalar index_fill_.int_Tensor scatter_.src "
    "scatter_.value scatter_.reduce scatter_.value_reduce scatter_add_ scatter_reduce_.two index_reduce_ put_ "
    "masked_scatter_ floor_divide_.Tensor floor_divide_.Scalar renorm_ tril_ triu_ cumsum_ cumprod_"
)


@cache
def install() -> None:
    """Makes them work on whole tensors. Has an effect once per process."""
    handle(_READS, _read)
    handle(_WRITES, _write)
    if (find := getattr(DTensor._op_dispatcher, _FINDING, None)) is not None:
        setattr(DTensor._op_dispatcher, _FINDING, partial(_find_layout, find))


def _find_layout(find: Callable[..., Any], operator: Any, args: Any, kwargs: Any, *others: Any) -> Any:
    """The layout that DTensor finds for an operator on sharded tensors; where it has none, the operator's result, of
    whole tensors. Collective then."""
    try:
        return find(operator, args, kwargs, *others)
    except (NotImplementedError, RuntimeError):  # before anything is computed
        if not _gives_new_tensors(operator) or active_fake_mode() is not None:
            raise
    return of_whole(operator, on_one_device(args), kwargs)


def _gives_new_tensors(operator: Any) -> bool:
    """Whether it neither writes to its arguments nor returns views of them, and draws no random numbers, which may
    differ between ranks."""
    arguments = (*operator._schema.arguments, *operator._schema.returns)
    return not any(one.alias_info for one in arguments) and torch.Tag.nondeterministic_seeded not in operator.tags


def _read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective. UsageError where each rank reads other elements in a loss."""
    refuse_different_indices(operator, args)
    return of_whole(operator, on_one_device(args), kwargs)


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective."""
    tensor = args[0]
    if not is_dtensor(tensor):
        return into_plain(operator, args, kwargs)
    if is_pending(tensor):
        settle_in_place(tensor)
    if operator in _MASKS and is_dtensor(args[1]):
        return as_torch_does(operator, args, kwargs)
    with copied_parts.written(tensor):
        return in_place_of_whole(operator, tensor, on_one_device(args)[1:], kwargs)
