"""Models and tensors that torch has wrapped: what is inside, and which part of it this rank holds.

torch's DTensor and FSDP take half a second to import, so nothing here does before it is needed.
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
    """Whether the value is a DTensor; there is none before torch's module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def is_fsdp(value: Any) -> bool:
    """Whether the value is the module of a unit of FSDP2; there is none before torch's module is imported."""
    module = sys.modules.get("torch.distributed.fsdp")
    return isinstance(value, getattr(module, "FSDPModule", ()))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def clean_name(name: str) -> str:
    """An fqn without the wrappers that torch puts into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, a plain one as it is; shares its memory, and not its graph."""
    with torch.no_grad():  # else every call would build an autograd node
        return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, one slice a dim: `whole[local_slices(tensor)]`.

    One dim is split into equal chunks, the last ones shorter or empty.
    """
    slices = [slice(0, size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            size = tensor.shape[dim]
            chunk = -(-size // tensor.device_mesh.size(axis))
            start = min(chunk * tensor.device_mesh.get_local_rank(axis), size)
            slices[dim] = slice(start, min(start + chunk, size))
    return tuple(slices)


def sharded_like(part: torch.Tensor, like: Any) -> DTensor:
    """This rank's part as a tensor that is sharded as `like` is. No communication; shares the part's memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
