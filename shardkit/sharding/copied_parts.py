"""Refuses writing to a part of a sharded tensor: `embed.weight[0].zero_()`, `p.grad[:n] = 0`.

A part along the sharded dim is no view in torch, but a copy that all ranks get, so a write to it would be lost without
a word. Such copies get a class of their own here, of which the methods that write raise. (Checked on torch 2.13.)
"""

from functools import cache
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from shardkit.errors import UsageError
from shardkit.sharding.random_values import as_torch_does

_aten = torch.ops.aten
_PARTS = (
    *(_aten.select.int, _aten.slice.Tensor, _aten.diagonal.default),
    *(_aten.split.Tensor, _aten.split_with_sizes.default),
)
_ASSIGNMENTS = (_aten.copy_.default, _aten.fill_.Tensor)
"""What torch calls for `tensor[...] = values`, without a method of the part."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "sharded tensor: a part along its sharded dim is a copy, so writing to it would change nothing (got something "
        "like weight[0].zero_() or weight[:2] = ...); on all ranks take values = weight.full_tensor(), write to these, "
        "then weight.data = values (weight.grad = distribute_tensor(values, weight.device_mesh, weight.placements))."
    )


def _writing_methods() -> dict[str, Any]:
    keep_values = {"requires_grad_", "detach_", "share_memory_", "rename_"}
    named = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
    operators = [name for name in dir(torch.Tensor) if name.startswith("__i") and f"__{name[3:]}" in dir(torch.Tensor)]
    return dict.fromkeys([*set(named) - keep_values, *operators, "__setitem__"], _refuse)


CopiedPart = type("CopiedPart", (DTensor,), {"__doc__": "A copy of a part.", "__slots__": (), **_writing_methods()})


@cache
def install() -> None:
    """Makes writes to parts raise. Has an effect once per process."""
    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", None)
    if handlers is not None:
        for operator in _PARTS:
            handlers.setdefault(operator, _part)
        for operator in _ASSIGNMENTS:
            handlers.setdefault(operator, _assign)


def _part(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = as_torch_does(operator, args, kwargs)
    for part in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(args[0], CopiedPart) or _sharded_axes(part) < _sharded_axes(args[0]):
            part.__class__ = CopiedPart
    return found


def _sharded_axes(tensor: DTensor) -> int:
    return sum(placement.is_shard() for placement in tensor.placements)


def _assign(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], CopiedPart):
        _refuse()
    return as_torch_does(operator, args, kwargs)
