"""Changes of gradients between backward and step: clipping by global norm, clamping, multiplication."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardkit.distributed import accelerators
from shardkit.distributed.tensors import is_dtensor, local_part


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """The global norm of the gradients over all ranks before clipping, a plain tensor. Clips them in place.

    Collective: one all-reduce of one number for each shard group; none where all gradients are replicated.
    """
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    parts = [local_part(gradient) for gradient in gradients]
    total = _global_norm(gradients, parts, float(norm_type))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for same in _by_kind(parts):
        torch._foreach_mul_(same, factor.to(same[0]))
    return total


def _global_norm(gradients: list[torch.Tensor], parts: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm from sums of powers of the gradients' local parts; those of sharded gradients are reduced over the ranks
    that share a replica."""
    is_wide = any(gradient.dtype in (torch.float64, torch.complex128) for gradient in gradients)
    dtype = torch.float64 if is_wide else torch.float32
    sharded: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
    devices: dict[dist.ProcessGroup, torch.device] = {}
    device = torch.device("cpu")
    replicated = []
    for gradient, part in zip(gradients, parts, strict=True):
        group = _shard_group(gradient)
        if group is None:
            replicated.append(part)
            device = part.device
        else:
            sharded[group].append(part)
            # Not the gradient's own device: an offloaded one is on the CPU, where NCCL does not work.
            devices[group] = accelerators.current(gradient.device_mesh.device_type)  # type: ignore[attr-defined]
    sums = [_power_sum(replicated, norm_type, device, dtype)] if replicated else []
    for group, locals_ in sharded.items():
        mine = _power_sum(locals_, norm_type, devices[group], dtype)
        dist.all_reduce(mine, dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM, group=group)
        sums.append(mine)
    if not sums:
        return torch.zeros(())
    together = torch.stack([one.to(sums[0].device) for one in sums])
    return together.max() if norm_type == float("inf") else together.sum() ** (1.0 / norm_type)


def _power_sum(tensors: list[torch.Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Sum of |x|^norm_type over all tensors, on `device` and in `dtype`; for inf the maximum of |x|."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), device=device, dtype=dtype)
    norms: list[torch.Tensor] = []
    for same in _by_kind(tensors):
        if same[0].is_complex():
            same = [tensor.abs() for tensor in same]
        # One copy for all: those of offloaded gradients are in host memory, and the host waits for each copy.
        norms.append(torch.stack(list(torch._foreach_norm(same, norm_type, dtype=dtype))).to(device))
    stacked = torch.cat(norms)
    return stacked.max() if norm_type == float("inf") else (stacked**norm_type).sum()


def _by_kind(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Lists of tensors of one device and dtype, as torch's foreach operators need them."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.device, tensor.dtype].append(tensor)
    return found.values()


def _shard_group(gradient: torch.Tensor) -> dist.ProcessGroup | None:
    """The process group over which this gradient is sharded; None where it is replicated."""
    if is_dtensor(gradient):
        for axis, placement in enumerate(gradient.placements):
            if placement.is_shard():
                return gradient.device_mesh.get_group(axis)
    return None


def multiply_gradients_(parameters: Sequence[torch.Tensor], factor: float) -> None:
    """Multiplies, in place, the gradient of each parameter that has one."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


def clamp_gradients_(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Clamps, in place, every element of the parameters' gradients to [-limit, limit]."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-limit, limit)


def zero_gradients_(parameters: Sequence[torch.Tensor]) -> None:
    """Sets the gradient of each parameter that has one to zero, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach()
            local_part(parameter.grad).zero_()


def are_mixed(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether some are sharded and others are not: torch's foreach operators take no such list."""
    return len({is_dtensor(parameter) for parameter in parameters}) > 1
