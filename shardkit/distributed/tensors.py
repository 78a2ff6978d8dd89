"""Models and tensors that torch has wrapped: what is inside, and which part of it this rank holds."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

# Wrappers that torch puts into module names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


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
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_rows(tensor: DTensor) -> slice:
    """Which rows of the whole tensor this rank holds: dim 0 in equal chunks, the last ones shorter or empty."""
    start, stop = 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            chunk = -(-tensor.shape[0] // tensor.device_mesh.size(axis))
            start = min(chunk * tensor.device_mesh.get_local_rank(axis), tensor.shape[0])
            stop = min(start + chunk, tensor.shape[0])
    return slice(start, stop)


def sharded_like(part: torch.Tensor, like: Any) -> DTensor:
    """This rank's part as a tensor that is sharded as `like` is. No communication; shares the part's memory."""
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
