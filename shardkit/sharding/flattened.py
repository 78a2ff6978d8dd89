"""Flattening of sharded tensors whose parts differ in size: `p.grad.flatten()`, `parameters_to_vector(parameters)`.

torch refuses these, so that a script which joins all gradients would work with some sizes of layers only. Here they are
flattened whole, into a copy that all ranks get (see `copied_parts`); what is written to it reaches the tensor, as in a
view. (Checked on torch 2.11 to 2.15.)
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, own_part
from shardkit.sharding.copied_parts import CopiedPart, as_copy
from shardkit.sharding.dtensor_operators import as_torch_does, handle
from shardkit.sharding.settled import is_uneven, replicated

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Whole:
    """A tensor of which a copy has another shape."""

    of: DTensor

    def write(self, part: DTensor) -> None:
        local_part(self.of).copy_(own_part(local_part(part).view(self.of.shape), self.of))


@cache
def install() -> None:
    """Makes them flatten. Has an effect once per process."""
    handle((_aten.view.default, _aten._unsafe_view.default), _view)


def _view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return as_torch_does(operator, args, kwargs)
    except RuntimeError:  # before anything is computed
        if not is_uneven(args[0]):
            raise
    source = None if isinstance(args[0], CopiedPart) else _Whole(args[0])
    return as_copy(as_torch_does(operator, (replicated(args[0]), *args[1:]), kwargs), source)
