"""Flattening of sharded tensors whose parts differ in size: `p.grad.flatten()`, `parameters_to_vector(parameters)`.

torch refuses these, so that a script which joins all gradients would work with some sizes of layers only. Here they are
flattened whole, into a copy that all ranks get (see `copied_parts`). (Checked on torch 2.13.)
"""

from functools import cache
from typing import Any

import torch

from shardkit.sharding.copied_parts import as_copy
from shardkit.sharding.dtensor_operators import as_torch_does, handle
from shardkit.sharding.settled import is_uneven, replicated

_aten = torch.ops.aten


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
    return as_copy(as_torch_does(operator, (replicated(args[0]), *args[1:]), kwargs))
