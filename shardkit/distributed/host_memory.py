"""Copies in host memory of an accelerator's tensors, and which optimizers keep their state there.

Copies run on the compute stream: the device needs no synchronization for them, the host does before it reads one.
"""

from typing import Any

import torch

from shardkit.distributed import accelerators
from shardkit.distributed.tensors import local_part


def copied_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where the accelerator can copy from there by itself."""
    pins = can_pin_for(tensor)
    return torch.empty_like(tensor, device="cpu", pin_memory=pins).copy_(tensor, non_blocking=pins)


def can_pin_for(tensor: torch.Tensor) -> bool:
    """Whether copies of it in host memory are pinned."""
    return tensor.device.type != "cpu" and accelerators.can_pin()


def copied_to_device(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device of one in host memory."""
    return torch.empty_like(copy, device=device, pin_memory=False).copy_(copy, non_blocking=copy.is_pinned())


def keep_state_there(optimizer: Any, keeps: bool) -> None:
    """Notes whether the optimizer's state is in host memory between steps."""
    optimizer._shardkit_keeps_state_on_host = keeps


def keeps_state_there(optimizer: Any) -> bool:
    """Whether the optimizer's state is in host memory between steps."""
    return getattr(optimizer, "_shardkit_keeps_state_on_host", False)


def device_of_state(optimizer: Any, parameter: torch.Tensor, dims: int) -> torch.device:
    """Where tensors of a parameter's state with so many dims are between steps; those without stay on the device."""
    return torch.device("cpu") if dims and keeps_state_there(optimizer) else local_part(parameter).device
