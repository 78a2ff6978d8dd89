"""Elements of a sharded tensor that tensors choose: `embed.weight[is_new]`, `p.grad[ids] = 0`, `p[p > 1] = 1`; and
which are not zero.

Textual inversion, new tokens and frozen rows are written so. torch refuses to mix the two kinds of tensors, cannot tell
how many elements a mask chooses, and has no in-place operator for rows of a sharded dim. Here the operator works on the
whole tensor, of which each rank keeps its part. Plain tensors count as equal on all ranks, and what is read is a copy
that all of them get. A value that is pending is reduced first, as in the gradient of `(p.T @ p).norm()`. (Checked on
torch 2.11 to 2.15.)
"""

from functools import cache
from typing import Any

import torch

from shardkit.distributed.tensors import is_dtensor
from shardkit.sharding import copied_parts
from shardkit.sharding.dtensor_operators import as_torch_does, handle
from shardkit.sharding.settled import in_place_of_whole, is_pending, of_whole, settle_in_place

_aten = torch.ops.aten
_MASKS = (_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor)
"""With a sharded mask they need no whole tensor."""
_READS = (
    *(_aten.index.Tensor, _aten.index_select.default, _aten.index_put.default, _aten._unsafe_index_put.default),
    *(_aten.masked_select.default, _aten.masked_scatter.default, _aten.nonzero.default),
)
_WRITES = (
    *(_aten.index_put_.default, _aten._index_put_impl_.default, _aten.index_copy_.default, _aten.index_add_.default),
    *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor, *_MASKS),
)


@cache
def install() -> None:
    """Makes them work on whole tensors. Has an effect once per process."""
    handle(_READS, _read)
    handle(_WRITES, _write)


def _read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective."""
    if not is_dtensor(args[0]):
        return as_torch_does(operator, args, kwargs)
    return of_whole(operator, args, kwargs)


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective."""
    tensor = args[0]
    if is_dtensor(tensor) and is_pending(tensor):
        settle_in_place(tensor)
    is_by_parts = operator in _MASKS and all(map(is_dtensor, args[:2]))
    if not is_dtensor(tensor) or is_by_parts:
        return as_torch_does(operator, args, kwargs)
    with copied_parts.written(tensor):
        return in_place_of_whole(operator, tensor, args[1:], kwargs)
