"""Steps of optimizers that were not prepared: they are counted. Refused are an optimizer built before its model was
prepared, and a step on gradients that are not final.

Some scripts prepare only the model; some optimizers step an inner one (SAM's second_step). torch calls these hooks at
each step of any optimizer in the process.
"""

from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardkit.distributed.modules import every_parameter
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.optim.kernels import parameters_of
from shardkit.optim.rebind import same_objects
from shardkit.optim.stepping import refuse_unfit
from shardkit.runtime.steps.accumulate import Accumulation
from shardkit.sharding.original_parameters import ReleasedParameter

log = get_logger(__name__)
_runs: WeakSet[Accumulation] = WeakSet()


class _Seen(NamedTuple):
    """An optimizer that was not prepared, at its last step: models are walked through again only where it or they are
    others."""

    parameters: list[torch.Tensor]
    models: list[ref[nn.Module]]
    """All that were prepared by then."""
    owners: WeakSet[Accumulation]
    """The runs whose models it trains."""


_seen: WeakKeyDictionary[torch.optim.Optimizer, _Seen] = WeakKeyDictionary()


def watch(accumulation: Accumulation) -> None:
    """Reports later steps on its models' parameters to the accumulation, as long as it exists."""
    _runs.add(accumulation)
    _install()


def others(accumulation: Accumulation) -> list[Accumulation]:
    """Those of the process's other Accelerators: each module of a script may have one."""
    return [one for one in _runs if one is not accumulation]


def stepped_on(accumulation: Accumulation) -> list[torch.optim.Optimizer]:
    """The optimizers that were not prepared and have stepped on its models."""
    return [optimizer for optimizer, seen in _seen.items() if accumulation in seen.owners]


@cache
def _install() -> None:
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_note)


def _check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _is_inside_prepared():
        return
    seen = _seen.get(optimizer)
    parameters, models = [*parameters_of(optimizer)], [ref(model) for run in _runs for model in run.models]
    is_same = seen is not None and same_objects(seen.parameters, parameters)
    if seen is None or not is_same or seen.models != models:
        _refuse_released(optimizer, parameters)
        seen = _Seen(parameters, models, WeakSet(_owners(optimizer)))
    for accumulation in seen.owners:
        _refuse_early(accumulation, type(optimizer).__name__, parameters)
        if not is_same:
            refuse_unfit(optimizer)
            accumulation.events.on_foreign_optimizer(optimizer)
        accumulation.events.before_foreign_step()
    _seen[optimizer] = seen


def _refuse_released(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """UsageError where it has parameters that a prepared model no longer has."""
    if any(isinstance(parameter, ReleasedParameter) for parameter in parameters):
        raise UsageError(
            f"optimizer step: {type(optimizer).__name__} was built before its model was prepared, and was not prepared "
            "itself, so it holds parameters that the model no longer has; prepare both: "
            "model, optimizer = accelerator.prepare(model, optimizer)."
        )


def _refuse_early(accumulation: Accumulation, name: str, parameters: list[torch.Tensor]) -> None:
    """UsageError where the gradients of the parameters are not final."""
    if accumulation.defers(parameters):
        raise UsageError(
            f"optimizer step: {name} is not a prepared optimizer, so it steps in the middle of an accumulation "
            "window, on gradients that are not reduced over ranks yet; step with the optimizer that "
            "accelerator.prepare returned, or only where accelerator.sync_gradients is true."
        )
    if accumulation.has_scaled_gradients:
        raise UsageError(
            f"optimizer step: {name} is not a prepared optimizer, and the gradients still have fp16's loss scale; "
            "step with the optimizer that accelerator.prepare returned."
        )


def _note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _is_inside_prepared():
        return
    seen = _seen.get(optimizer)
    owners = [] if seen is None else [*seen.owners]
    for accumulation in owners:
        accumulation.note_step(optimizer, was_skipped=False)
    if not owners and any(run.models for run in _runs) and dist.is_initialized() and dist.get_world_size() > 1:
        _tell_of_stranger(type(optimizer).__name__)


def _is_inside_prepared() -> bool:
    """Whether this is the step of a prepared optimizer, or of one inside of it."""
    return any(accumulation.is_stepping for accumulation in _runs)


def _owners(optimizer: torch.optim.Optimizer) -> list[Accumulation]:
    """The runs whose models the optimizer trains, by its first parameter."""
    first = next(parameters_of(optimizer), None)
    return [run for run in _runs if any(first is p for model in run.models for p in every_parameter(model))]


@cache
def _tell_of_stranger(name: str) -> None:
    log.warning(
        "optimizer step: %s trains parameters of no prepared model, so their gradients are not reduced over ranks; "
        "prepare their module together with the optimizer.",
        name,
    )
