"""Notices schedules whose length was counted by the batches that a loader had before `prepare`: on several ranks an
epoch has fewer steps, and the training would end in the middle of the schedule."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import SequentialLR
from torch.utils.data import DataLoader

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.log import get_logger
from shardkit.runtime.lr_scheduler import AcceleratedScheduler
from shardkit.runtime.steps.accumulate import Accumulation

log = get_logger(__name__)

_CHECKED_STEP = 3
"""Schedules that have stepped before each of the steps so far count steps, and not epochs."""


@dataclass
class _Counted:
    """A schedule that was built before the loader was prepared, the loader's batches then, and the schedule's place at
    the first step."""

    scheduler: AcceleratedScheduler
    loader: PreparedLoader
    batches_before: int
    first_place: int = 0


class ScheduleLengths:
    """The check of one run."""

    def __init__(self, accumulation: Accumulation, is_main: bool) -> None:
        self._accumulation = accumulation
        self._counted: list[_Counted] = []
        self._steps = 0 if is_main else _CHECKED_STEP

    def note_prepared(
        self, loaders: Iterable[tuple[DataLoader, PreparedLoader]], schedulers: Sequence[AcceleratedScheduler]
    ) -> None:
        """Notes loaders, before and after `prepare`, and the schedules prepared so far."""
        if self._steps < _CHECKED_STEP:
            self._counted += [
                _Counted(scheduler, loader, batches)
                for before, loader in loaders
                if loader is not before and (batches := _batches(before))
                for scheduler in schedulers
            ]

    def check(self) -> None:
        """Warns, once, of a schedule that counts steps and is as long as some epochs of the loader before."""
        if self._steps == _CHECKED_STEP:
            return
        self._steps += 1
        if self._steps == 1:
            for one in self._counted:
                one.first_place = _place(one.scheduler)
        elif self._steps == _CHECKED_STEP:
            used = active_loader([one.loader for one in self._counted])
            texts = [self._problem(one) for one in self._counted if one.loader is used and _counts_steps(one)]
            for text in [*filter(None, texts)][:1]:
                log.warning(text)
            self._counted.clear()

    def _problem(self, one: _Counted) -> str | None:
        size, length, batches = self._accumulation.steps, _length(one.scheduler.scheduler), one.batches_before
        now = math.ceil(len(one.loader) / size)
        counts = (batches // size, math.ceil(batches / size))  # by batches alone it would be told of 4 epochs / 4, too
        epoch = next((count for count in counts if count > now and length and length % count == 0), None)
        if length is None or epoch is None:
            return None
        by = "its len" if size == 1 else "its len, divided by gradient_accumulation_steps"
        epochs = "an epoch" if length == epoch else f"{length // epoch:,} epochs"
        return (
            f"schedule: {type(one.scheduler.scheduler).__name__} has {length:,} steps, as many as {epochs} had with "
            f"the loader before prepare (got {now:,} steps an epoch now, {epoch:,} before), so {epochs} would end in "
            f"its middle; prepare the loader first and count by {by}, or keep the script's batch size for all ranks "
            f"together: Accelerator(split_batches=True). For a training of {length:,} steps it is right."
        )


def _batches(loader: DataLoader) -> int | None:
    """How many it has; None where its dataset has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _place(scheduler: AcceleratedScheduler) -> int:
    return getattr(scheduler.scheduler, "last_epoch", 0)


def _counts_steps(one: _Counted) -> bool:
    """Whether it has stepped once with each optimizer step: not once per epoch, nor once per rank."""
    return one.scheduler.steps_per_call == 1 and _place(one.scheduler) - one.first_place == _CHECKED_STEP - 1


def _length(schedule: Any) -> int | None:
    """How many steps a schedule of torch or Transformers is built for; None where it does not say."""
    if isinstance(schedule, SequentialLR):
        last = _length(schedule._schedulers[-1])
        return None if last is None else schedule._milestones[-1] + last
    told = [getattr(schedule, name, None) for name in ("total_steps", "T_max", "total_iters")]
    told += [getattr(one, "keywords", {}).get("num_training_steps") for one in getattr(schedule, "lr_lambdas", ())]
    return next((length for length in told if isinstance(length, int)), None)
