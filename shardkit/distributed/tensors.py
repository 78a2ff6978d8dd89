"""Unwraps models, and finds this rank's part of sharded tensors.

DTensor and FSDP take half a second to import, so this module does not import them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Wrappers that torch puts into module names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether the value is a DTensor, without importing torch's module."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def is_fsdp(value: Any) -> bool:
    """Whether the value is an FSDP2 module, without importing torch's module."""
    module = sys.modules.get("torch.distributed.fsdp")
    return isinstance(value, getattr(module, "FSDPModule", ()))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, without the wrappers of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def clean_name(name: str) -> str:
    """An fqn without the names of torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded tensor, or the plain tensor; detached, sharing its memory."""
    with torch.no_grad():  # else every call would build an autograd node
        return _plain(tensor.to_local()) if is_dtensor(tensor) else tensor.detach()


def _plain(local: torch.Tensor) -> torch.Tensor:
    """A part that FSDP gathers in fp8 is torchao's tensor around the values: those."""
    module = sys.modules.get("torchao.float8.fsdp_utils")
    kind = getattr(module, "WeightWithDynamicFloat8CastTensor", ())
    return local._tensor if isinstance(local, kind) else local


def whole(tensor: DTensor) -> torch.Tensor:
    """All ranks' parts of a sharded tensor together, on every rank. Collective."""
    return sharded_like(local_part(tensor), tensor).full_tensor()


def local_rows(tensor: DTensor) -> slice:
    """The rows of the full tensor that this rank holds: dim 0 in equal chunks, the last ones shorter or empty."""
    start, stop = 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            chunk = -(-tensor.shape[0] // tensor.device_mesh.size(axis))
            start = min(chunk * tensor.device_mesh.get_local_rank(axis), tensor.shape[0])
            stop = min(start + chunk, tensor.shape[0])
    return slice(start, stop)


def sharded_like(part: torch.Tensor, like: Any) -> DTensor:
    """A DTensor with the mesh and placements of `like` from this rank's local part. No communication; shares memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
