"""Random values for sharded tensors: each rank draws the whole tensor and keeps its part.

torch draws parts by an offset into the numbers of a seed, which generators of CUDA's kind have. On the CPU, each rank
would draw its part with the same seed, so all shards would have the same values; where an extension's device has
another generator, torch raises. Drawn values are never pending: ranks' would be added up. (Checked on torch 2.11 to
2.13.)
"""

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed import accelerators
from shardkit.distributed.tensors import local_part, own_part, sharded_like, whole
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.settled import settle

_aten = torch.ops.aten
_IN_PLACE = operators(
    "normal_ uniform_ bernoulli_.float exponential_ log_normal_ cauchy_ geometric_ random_ random_.to random_.from"
)
_LIKE = operators("rand_like randn_like randint_like randint_like.low_dtype")
# Each value is drawn by the value in its place in another tensor.
_BY_VALUES = operators(
    "bernoulli bernoulli.p bernoulli_.Tensor poisson normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor"
)


@cache
def install() -> None:
    """Install the operators. Has an effect once per process."""
    handle((*_IN_PLACE, *_LIKE), _drawn_whole)
    handle(_BY_VALUES, _drawn_by_whole)
    handle([_aten.native_dropout.default], _drop)


def _drawn_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, and keep this rank's part. Not collective: ranks must have equal generator states."""
    like = args[0] if operator in _IN_PLACE else settle(args[0])
    if accelerators.draws_by_offset(like.device):
        return as_torch_does(operator, args, kwargs)
    drawn = operator(torch.empty(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs)
    part = own_part(drawn, like)
    if operator in _LIKE:
        return sharded_like(part.contiguous(), like)
    local_part(like).copy_(part)
    return like


def _drawn_by_whole(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw by the whole values, and keep this rank's part. Collective; ranks must have equal generator states."""
    like = settle(next(value for value in args if isinstance(value, DTensor)))
    if accelerators.draws_by_offset(like.device):
        return as_torch_does(operator, args, kwargs)
    drawn = operator(*(whole(one).to(one.device) if isinstance(one, DTensor) else one for one in args), **kwargs)
    part = own_part(drawn, like)
    if operator is not _aten.bernoulli_.Tensor:
        return sharded_like(part.contiguous(), like)
    local_part(args[0]).copy_(part)
    return args[0]


def _drop(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout as devices have it: the values that are left, scaled, and which ones. Ranks must have equal generator
    states."""
    like = settle(args[0])
    if accelerators.draws_by_offset(like.device):
        return as_torch_does(operator, args, kwargs)
    drawn = operator(torch.ones(like.shape, dtype=like.dtype, device=like.device), *args[1:], **kwargs)
    scales, is_left = (own_part(one, like).contiguous() for one in drawn)
    return sharded_like(local_part(like) * scales, like), sharded_like(is_left, like)
