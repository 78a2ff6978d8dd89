"""Other shapes of sharded tensors that torch refuses: `p.grad.flatten()` of parts that differ in size, a view whose
first dim the ranks do not divide (`p.view(heads, -1)`), `squeeze` and `expand` of a sharded dim of one; and those in
which it gives each rank several parts (`p.T.flatten()`).

With torch a script would work with some sizes of layers only. Here the tensor is taken whole, into a copy that all
ranks get (see `copied_parts`); what is written to it reaches the tensor, as in a view. (Checked on torch 2.11 to 2.15.)
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardkit.distributed.tensors import local_part, own_part, sharded_like
from shardkit.sharding.tensors.copied_parts import CopiedPart, as_copy
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.settled import replicated

_aten = torch.ops.aten
_VIEWS = operators("view _unsafe_view squeeze squeeze.dim squeeze.dims")


@dataclass(frozen=True)
class _Whole:
    """A tensor of which a copy has another shape."""

    of: DTensor

    def write(self, part: DTensor) -> None:
        local_part(self.of).copy_(own_part(local_part(part).view(self.of.shape), self.of))


@cache
def install() -> None:
    """Makes them possible. Has an effect once per process."""
    handle((*_VIEWS, _aten.expand.default), _reshape)


def _reshape(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where torch refuses, or gives ranks parts that a plain tensor beside them does not have."""
    tensor, *others = args
    try:
        found = as_torch_does(operator, args, kwargs)
    except RuntimeError:  # before anything is computed
        found = None
    if found is not None and (_is_interleaved(tensor) or not _is_interleaved(found)):
        return found
    whole = replicated(tensor)
    in_order = sharded_like(local_part(whole).contiguous(), whole)  # a gather by columns is not, with torch 2.11
    whole = as_torch_does(operator, (in_order, *others), kwargs)
    has_place = operator in _VIEWS and not isinstance(tensor, CopiedPart)
    return as_copy(whole, _Whole(tensor) if has_place else None)


def _is_interleaved(tensor: DTensor) -> bool:
    """Whether ranks have several parts each, as of a matrix that is sharded by columns and flattened."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)
