"""Gradients that are set aside, while others reach the same parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.errors import UsageError
from shardkit.sharding.gradient_sync import parameters_of_group, partly_reduced_groups


@dataclass(frozen=True)
class TakenGradients:
    """The gradients of some parameters, and the sums of FSDP units that wait for their reduction between the replicas
    of a hybrid strategy."""

    of_parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    of_units: Sequence[tuple[Any, torch.Tensor, dict[Any, tuple[int, int]]]]


def take(models: Iterable[nn.Module], parameters: Sequence[torch.Tensor]) -> TakenGradients:
    """Takes the parameters' gradients. Those of units with other trainable parameters, too, stay where they wait for
    replicas: torch keeps them in one buffer."""
    own = {id(parameter) for parameter in parameters}
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    sums = []
    for group in (one for model in models for one in partly_reduced_groups(model)):
        if all(id(p) in own for p in parameters_of_group(group) if p.requires_grad):
            sums.append((group, group._partial_reduce_output, _layout(group)))
            _set(group, None, {})
    return TakenGradients(gradients, sums)


def put_back(taken: TakenGradients) -> None:
    """Sets what was taken, in place of what came since."""
    for parameter, gradient in taken.of_parameters:
        parameter.grad = gradient
    for group, value, layout in taken.of_units:
        _set(group, value, layout)


def add_back(taken: TakenGradients) -> None:
    """Adds what was taken to what came since. UsageError where backwards through other parameters of a unit came since,
    whose sums wait for the other replicas."""
    for parameter, gradient in taken.of_parameters:
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
    for group, value, layout in taken.of_units:
        newer = group._partial_reduce_output
        if newer is not None and (newer.shape != value.shape or _layout(group) != layout):
            raise UsageError(
                "optimizer step: the losses of several optimizers reached different parameters of an FSDP unit, and "
                "wait for their reduction between replicas (got no zero_grad between them); call zero_grad before "
                "each optimizer's backward, or use a strategy that is not hybrid."
            )
        _set(group, value if newer is None else value + newer, layout)


def _layout(group: Any) -> dict[Any, tuple[int, int]]:
    return dict(getattr(group, "_partial_reduce_output_layout", {}))  # from torch 2.15 on


def _set(group: Any, value: torch.Tensor | None, layout: dict[Any, tuple[int, int]]) -> None:
    group._partial_reduce_output = value
    if hasattr(group, "_partial_reduce_output_layout"):
        group._partial_reduce_output_layout = layout
