"""Random values for sharded tensors on the CPU: each rank draws the whole tensor and keeps its part.

torch supports random operators on DTensors only on accelerators. On the CPU, each rank would draw its part with the
same seed, so all shards would have the same values. (Checked on torch 2.11 to 2.13.)
"""

from functools import cache
from typing import Any

import torch

from shardkit.distributed.tensors import local_part, local_slices, sharded_like
from shardkit.sharding.dtensor_operators import as_torch_does, handle

_aten = torch.ops.aten
_IN_PLACE = (_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float)
_LIKE = (
    *(_aten.rand_like.default, _aten.randn_like.default),
    *(_aten.randint_like.default, _aten.randint_like.low_dtype),
)


@cache
def install() -> None:
    """Install the operators for the CPU. Has an effect once per process."""
    handle((*_IN_PLACE, *_LIKE), _drawn_whole)


def _drawn_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, and keep this rank's part. Not collective: ranks must have equal generator states."""
    like = args[0]
    if like.device.type != "cpu":
        return as_torch_does(operator, args, kwargs)
    whole = operator(torch.empty(like.shape, dtype=like.dtype, device="cpu"), *args[1:], **kwargs)
    part = whole[local_slices(like)]
    if operator in _LIKE:
        return sharded_like(part.contiguous(), like)
    local_part(like).copy_(part)
    return like
