"""Plain attributes of Accelerate's `Accelerator`, which scripts also set after they created it.

Setting one takes effect in this run, or raises UsageError: without a property Python would store any value silently.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from shardkit.compat.kinds import LoggerType
from shardkit.data.loader import PreparedLoader
from shardkit.errors import UsageError
from shardkit.runtime.project import ProjectConfiguration, project_of
from shardkit.runtime.run import Run
from shardkit.tracking import trackers
from shardkit.tracking.tracker import Tracker


def _prepared(kind: str) -> property:
    """The run's list of prepared objects of a kind. It cannot be replaced."""

    def found(self: "PlainAttributes") -> list[Any]:
        return getattr(self._run, kind)

    def put(self: "PlainAttributes", value: Iterable[Any]) -> None:
        before, after = found(self), list(value)
        if len(before) != len(after) or any(one is not other for one, other in zip(before, after, strict=True)):
            raise UsageError(
                f"Accelerator: the prepared {kind} cannot be replaced (got {len(after)} for {len(before)}); "
                "free_memory() drops everything that is prepared."
            )

    return property(found, put)


class PlainAttributes:
    """These attributes, as properties."""

    _run: Run

    @property
    def native_amp(self) -> bool:
        """Whether compute is in fp16, bf16 or fp8. Another value raises UsageError: it is the run's mixed precision."""
        return self._run.config.mixed_precision != "no"

    @native_amp.setter
    def native_amp(self, native_amp: bool) -> None:
        if bool(native_amp) != self.native_amp:
            raise UsageError(
                f"native_amp: the mixed precision of this run is {self._run.config.mixed_precision} (got native_amp = "
                f"{native_amp}); set Accelerator(mixed_precision=...), or mixed_precision in shardkit.yaml."
            )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of an fp16 run, else None."""
        return self._run.accumulation.loss_scale.scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        is_on = scaler is not None and (not hasattr(scaler, "is_enabled") or scaler.is_enabled())
        if scaler is not self.scaler and (is_on or self.scaler is not None):
            raise UsageError(
                f"Accelerator.scaler: the run has one loss scaler, under fp16 (got a {type(scaler).__name__} in a run "
                f"with mixed_precision {self._run.config.mixed_precision}); leave it out, and set the scale by "
                "GradScalerKwargs."
            )

    @property
    def step(self) -> int:
        """Micro-batches of the current accumulation window so far."""
        return self._run.counters.micro_step

    @step.setter
    def step(self, step: int) -> None:
        """A multiple of the window's micro-batches lets the next micro-batch begin a window."""
        steps = self._run.accumulation.steps
        if step % steps:
            raise UsageError(
                f"Accelerator.step: a window cannot begin in its middle (got {step} with {steps} micro-batches per "
                f"window); set a multiple of {steps}, such as 0."
            )
        self._run.counters.micro_step = 0

    @property
    def log_with(self) -> list[Any]:
        """The selected trackers, which `init_trackers` starts."""
        selected = trackers.expanded(self._run.trackers.selected)
        return [LoggerType(one) if one in LoggerType.list() else one for one in selected]

    @log_with.setter
    def log_with(self, log_with: Any) -> None:
        selected = trackers.chosen(log_with)
        if self._run.process.is_main and (problem := trackers.missing(selected)):
            raise UsageError(problem)
        self._run.trackers.selected = selected

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers that `log` writes to."""
        return self._run.trackers.active

    @trackers.setter
    def trackers(self, given: Iterable[Tracker]) -> None:
        found = list(given)
        if others := [type(one).__name__ for one in found if not isinstance(one, Tracker)]:
            raise UsageError(
                f"Accelerator.trackers: not a tracker (got {', '.join(others)}); give objects of a subclass of "
                "GeneralTracker, or select trackers by log_with."
            )
        self._run.trackers.active[:] = found

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The project folder and how its checkpoints are named."""
        return self._run.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._run.project = project_of(None, project)

    @property
    def device_placement(self) -> bool:
        """Whether `prepare` moves models and batches to the device."""
        return self._run.loops.device_placement

    @device_placement.setter
    def device_placement(self, moves: bool) -> None:
        self._run.loops = replace(self._run.loops, device_placement=bool(moves))

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers that are prepared from now on step only where their optimizer steps."""
        return self._run.loops.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, steps_with: bool) -> None:
        self._run.loops = replace(self._run.loops, step_scheduler_with_optimizer=bool(steps_with))

    _models = _prepared("models")
    _optimizers = _prepared("optimizers")
    _schedulers = _prepared("schedulers")
    _custom_objects = _prepared("registered")

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        """The prepared loaders. One that is taken out is not saved, until a loop over it begins."""
        return self._run.loaders

    @_dataloaders.setter
    def _dataloaders(self, loaders: Iterable[PreparedLoader]) -> None:
        self._run.loaders[:] = loaders
