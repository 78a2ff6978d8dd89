"""Loss scaling for fp16, over sharded and plain parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardkit.config.meaning import dtypes
from shardkit.config.schema import Config
from shardkit.distributed.tensors import is_dtensor, local_part


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler on the local parts of sharded gradients.

    An overflow on one rank makes all ranks skip the step and reduce the scale.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        parts: Any = _Parts([{"params": [_part(p) for p in parameters]}])
        found = super()._unscale_grads_(parts, inv_scale, found_inf, allow_fp16)
        if any(is_dtensor(p) for p in parameters):  # whole gradients are the same on every rank
            for value in found.values():
                dist.all_reduce(value, dist.ReduceOp.MAX)
        return found


@dataclass(frozen=True)
class _Parts:
    """The part of an optimizer that unscaling uses."""

    param_groups: list[dict[str, Any]]


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is the local part of the parameter's gradient, in the same memory."""
    if not is_dtensor(parameter):
        return parameter
    part = local_part(parameter).detach()
    part.grad = None if parameter.grad is None else local_part(parameter.grad)
    return part


def make_scaler(config: Config, device: torch.device) -> GradScaler | None:
    """The loss scaler that fp16 needs, starting at the configured scale; None where compute is not fp16."""
    if not dtypes(config).scales_loss:
        return None
    section = config.shardkit.precision
    return GradScaler(
        device.type,
        init_scale=section.init_scale,
        growth_factor=section.growth_factor,
        backoff_factor=section.backoff_factor,
        growth_interval=section.growth_interval,
    )
