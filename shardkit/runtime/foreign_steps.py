"""Steps of optimizers that were not prepared: they are counted; an optimizer built before its model was prepared is
refused.

Some scripts prepare only the model; some optimizers step an inner one (SAM's second_step). torch calls these hooks at
each step of any optimizer in the process.
"""

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime.accumulate import Accumulation
from shardkit.sharding.original_parameters import ReleasedParameter

log = get_logger(__name__)
_runs: WeakSet[Accumulation] = WeakSet()


def watch(accumulation: Accumulation) -> None:
    """Reports later steps on its models' parameters to the accumulation, as long as it exists."""
    _runs.add(accumulation)
    _install()


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_refuse_released)
    register_optimizer_step_post_hook(_note)


def _first_parameter(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    return next((p for group in optimizer.param_groups for p in group["params"]), None)


def _refuse_released(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if isinstance(_first_parameter(optimizer), ReleasedParameter):
        raise UsageError(
            f"optimizer step: {type(optimizer).__name__} was built before its model was prepared, and was not prepared "
            "itself, so it holds none of the model's parameters; prepare both: "
            "model, optimizer = accelerator.prepare(model, optimizer)."
        )


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    first = _first_parameter(optimizer)
    runs = [accumulation for accumulation in _runs if accumulation.models]
    if any(accumulation.is_stepping for accumulation in runs):
        return
    owners = [run for run in runs if any(first is p for model in run.models for p in model.parameters())]
    for accumulation in owners:
        accumulation.note_step(optimizer, was_skipped=False)
    if runs and not owners and dist.is_initialized() and dist.get_world_size() > 1:
        _tell_of_stranger(type(optimizer).__name__)


@cache
def _tell_of_stranger(name: str) -> None:
    log.warning(
        "optimizer step: %s trains parameters of no prepared model, so their gradients are not reduced over ranks; "
        "prepare their module together with the optimizer.",
        name,
    )
