"""Loss scaling for fp16, where one optimizer may hold sharded and plain parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.config.schema import Config


class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler, for optimizers that hold sharded and plain parameters together as well.

    A gradient that overflows on one rank makes all ranks skip the step and halve the scale.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        part: Any
        for part in _by_kind(optimizer):
            for device, value in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        return found


@dataclass(frozen=True)
class _Part:
    """As much of an optimizer as unscaling looks at."""

    param_groups: list[dict[str, Any]]


def _by_kind(optimizer: torch.optim.Optimizer) -> list[_Part]:
    """The optimizer's parameters as parts that one multi-tensor operation takes: sharded ones, plain ones."""
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                kinds[isinstance(parameter.grad, DTensor)].append(parameter)
    return [_Part([{"params": parameters}]) for parameters in kinds.values() if parameters]


def make_scaler(config: Config, device: torch.device) -> GradScaler | None:
    """The loss scaler that fp16 needs, starting at the configured scale; None where compute is not fp16."""
    section = config.shardkit.precision
    if (section.param_dtype or config.mixed_precision) != "fp16":
        return None
    return GradScaler(device.type, init_scale=section.init_scale)
