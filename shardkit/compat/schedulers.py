"""`accelerate.scheduler`: the class of prepared schedulers, of which scripts also make their own."""

from collections.abc import Sequence
from typing import Any

from shardkit.compat.differences import takes_back
from shardkit.compat.states import PartialState
from shardkit.compat.touched import note_scheduler
from shardkit.errors import UsageError
from shardkit.runtime import lr_scheduler
from shardkit.runtime.optimizer import AcceleratedOptimizer


class _Prepared(type):
    """A metaclass that makes every prepared scheduler an instance of its class, and its class make such."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, lr_scheduler.AcceleratedScheduler)

    def __call__(
        cls, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> lr_scheduler.AcceleratedScheduler:
        given: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        own = [one for one in given if isinstance(one, AcceleratedOptimizer)]
        if len(own) < len(given) or not own:
            raise UsageError(
                f"AcceleratedScheduler: not a prepared optimizer (got {', '.join(type(one).__name__ for one in given)})"
                "; give the optimizer to prepare before, or the scheduler, too, in place of this call."
            )
        prepared = lr_scheduler.AcceleratedScheduler(scheduler, own, own[0].accumulation, step_with_optimizer)
        if step_with_optimizer:
            set_steps_per_call(prepared, PartialState().num_processes, split_batches)
        return prepared


class AcceleratedScheduler(metaclass=_Prepared):
    """A prepared scheduler. A call makes one that is not saved with the run, as with Accelerate."""


def set_steps_per_call(scheduler: lr_scheduler.AcceleratedScheduler, ranks: int, split_batches: bool) -> None:
    """Gives a scheduler that steps with its optimizer Accelerate's number of steps if the run asks for it."""
    if ranks > 1:
        note_scheduler()
        if takes_back("scheduler") and not split_batches:
            scheduler.steps_per_call = ranks
