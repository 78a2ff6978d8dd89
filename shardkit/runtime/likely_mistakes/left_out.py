"""Warns of what trains the prepared models and is in no checkpoint, so that a resumed run begins it anew: models for
evaluation that follow, and optimizers and schedules that were not prepared."""

from collections.abc import Iterator, Set
from typing import Any

from shardkit.log import get_logger
from shardkit.optim.kernels import parameters_of
from shardkit.runtime.run import Run
from shardkit.runtime.steps import foreign_steps
from shardkit.wording import first_few

log = get_logger(__name__)


def warn(run: Run) -> None:
    """At a save; once of each kind. Not where save hooks are registered, since these may save what the script wants."""
    run.followers.warn_of_changed(run.registered, has_hooks=bool(run.hooks.at_save))
    if run.hooks.at_save or "left out" in run.has_warned_of or not run.process.is_main:
        return
    registered = {id(one) for holder in run.registered for one in _within(holder)}
    if found := [*_optimizers(run, registered), *_schedules(run, registered)]:
        run.has_warned_of.add("left out")
        log.warning(
            "checkpoint: what trains the model and was not prepared is in no checkpoint, and a resumed run begins it "
            "anew (got %s); prepare it, or register it: accelerator.register_for_checkpointing(...).",
            first_few(found, 3),
        )


def _optimizers(run: Run, registered: Set[int]) -> Iterator[str]:
    """The classes of those that step on other parameters of the models than the prepared ones do."""
    prepared = {id(parameter) for one in run.optimizers for parameter in one.parameters}
    for one in foreign_steps.stepped_on(run.accumulation):
        if id(one) not in registered and not prepared.issuperset(map(id, parameters_of(one))):
            yield type(one).__name__


def _schedules(run: Run, registered: Set[int]) -> Iterator[str]:
    """What those that were not prepared schedule."""
    held = registered | {id(one) for schedule in run.schedulers for one in _within(schedule.scheduler)}
    for one in run.optimizers:
        if held.isdisjoint((id(one), id(one.optimizer))) and _has_schedule(one):
            yield f"a schedule of {type(one.optimizer).__name__}"


def _has_schedule(optimizer: Any) -> bool:
    """Whether a schedule of torch has been made for the optimizer in this process."""
    return any(hasattr(one.step, "_wrapped_by_lr_sched") for one in (optimizer, optimizer.optimizer))


def _within(holder: Any) -> Iterator[Any]:
    """An object, what it has as attributes, alone or in lists, and the optimizers of these."""
    for found in (holder, *getattr(holder, "__dict__", {}).values()):
        for one in found if isinstance(found, (list, tuple)) else (found,):
            yield one
            yield getattr(one, "__dict__", {}).get("optimizer")
