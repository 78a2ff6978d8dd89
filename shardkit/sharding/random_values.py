"""Random values for sharded tensors on the CPU: each rank draws the whole tensor and keeps its part.

torch supports random operators on DTensors only on accelerators. On the CPU, each rank would draw its part with the
same seed, so all shards would have the same values. (Checked on torch 2.11 to 2.13.)
"""

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, local_slices, sharded_like

_aten = torch.ops.aten
_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_LIKE = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)


@cache
def install() -> None:
    """Install the operators for the CPU. Has an effect once per process."""
    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", None)
    if handlers is not None:
        for operator in (*_IN_PLACE, *_LIKE):
            handlers.setdefault(operator, _drawn_whole)


def _drawn_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, and keep this rank's part. Not collective: ranks must have equal generator states."""
    like = args[0]
    if like.device.type != "cpu":
        return as_torch_does(operator, args, kwargs)
    whole = operator(torch.empty(like.shape, dtype=like.dtype), *args[1:], **kwargs)
    part = whole[local_slices(like)]
    if operator in _LIKE:
        return sharded_like(part.contiguous(), like)
    local_part(like).copy_(part)
    return like


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on sharded tensors without the handler that was installed for it."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)  # None where another thread is doing the same
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler
