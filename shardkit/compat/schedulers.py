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
        if step_with_optimizer and (ranks := PartialState().num_processes) > 1:
            note_scheduler()
            prepared.steps_per_call = ranks if takes_back("scheduler") and not split_batches else 1
        return prepared


class AcceleratedScheduler(metaclass=_Prepared):
    """A prepared scheduler. A call makes one that is not saved with the run, as with Accelerate."""
