"""Gradient accumulation: when gradients are reduced, what the loss is divided by, and what counts as a step.

A window is the micro-batches of one optimizer step: the configured number, or fewer where the loader ends. Its gradient
is the mean over its micro-batches, so a window of n, also a short one, equals one batch of its n micro-batches.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.distributed import progress, xla
from shardkit.distributed.modules import every_parameter
from shardkit.errors import UsageError
from shardkit.optim.loss_scale import LossScale
from shardkit.runtime.eager import eager
from shardkit.runtime.steps.boundaries import Boundaries
from shardkit.runtime.steps.counters import Backwards, Counters
from shardkit.runtime.steps.deferred_gradients import DeferredGradients
from shardkit.runtime.steps.optimizer_turns import OptimizerTurns
from shardkit.runtime.steps.step_events import StepEvents
from shardkit.runtime.steps.window_data import WindowData
from shardkit.sharding import hooks
from shardkit.sharding.gradient_sync import deferred, has_gradients, reduces

NEVER = ("never", -1)


@dataclass
class _Window:
    """The micro-batches of one optimizer step. In loops without `accumulate()` the last one, or one of none."""

    planned_size: int
    """Micro-batches that it was to have when it began; its losses are divided by it."""
    before: Backwards
    """Those until it began."""
    returned_before: int
    """As `hooks.times_returned` until then."""
    is_full: bool = True
    full_size: int = 0
    """Micro-batches, once it is full; 0 while it is being filled, and in loops without `accumulate()`."""
    loader: PreparedLoader | None = None
    """The one whose end ends it."""
    deferred: Sequence[nn.Module] = ()
    """Models whose gradients of the present micro-batch wait for a later one to reduce them."""


class Accumulation:
    """The state of the current window. One per Accelerator, shared by optimizers and schedulers."""

    def __init__(
        self,
        steps: int,
        models: Sequence[nn.Module],
        loaders: list[PreparedLoader],
        loss_scale: LossScale,
        counters: Counters,
        events: StepEvents,
        ends_with_data: bool = True,
    ) -> None:
        self.steps = steps
        """Micro-batches of the windows that begin from now on."""
        self.ends_with_data = ends_with_data
        """Whether the last batch of a loader ends a window early; else the window continues in the next loop."""
        self.models = models
        self.loss_scale = loss_scale
        self.counters = counters
        self.events = events
        self.boundaries = Boundaries(events)
        self.deferred_gradients = DeferredGradients()
        self.turns = OptimizerTurns(models)
        self.micro_batches = 0
        """Micro-batches begun in this process."""
        self.is_inside = False
        """Whether the script is inside `accumulate()`."""
        self.is_stepping = False
        """Whether a prepared optimizer is stepping: steps inside it do not count."""
        self.loaders = loaders
        self.data = WindowData(loaders)
        self.thread: threading.Thread | None = None
        """Of the last step of a prepared optimizer."""
        self._backwards = self._before_micro_batch = self._at_step = Backwards()
        """So far; until the present micro-batch; until the last step."""
        self._is_own_backward = False
        """Whether `backward` runs one, and not the script."""
        self._window = _Window(steps, self._backwards, hooks.times_returned())
        self.full_windows = 0
        """Windows that were full, or were closed early."""

        self.optimizers: WeakSet[Any] = WeakSet()
        """The prepared optimizers, which add themselves."""
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()
        """The optimizers that have taken part in the present step."""
        self._has_stepped_in_micro_batch = False

    @property
    def sync_gradients(self) -> bool:
        """Whether the window is full, or there is none, so that optimizers step."""
        return not self.is_gathering()

    def is_gathering(self) -> bool:
        """Whether a window is being filled, so that optimizers and schedulers do not step.

        A window whose loop was left (`break`) is not filled any further.
        """
        if self._window.is_full:
            return False
        loader = self._window.loader
        return self.is_inside or not self.ends_with_data or loader is None or loader.is_iterating

    def declare(self, is_full: bool) -> None:
        """For a loop that counts its micro-batches itself, outside of `micro_batch`: whether this one is the last of
        its window, so that optimizers step. Such a loop also controls when gradients are reduced (`no_sync`)."""
        self._window.is_full, self._window.loader, self._window.deferred = is_full, None, ()

    @contextmanager
    def micro_batch(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Context of one micro-batch, forward to zero_grad. For what is reduced before the window's last one, see
        `deferred`. One that raises does not count: the next takes its place in the window. One inside another is a part
        of it, with further models."""
        if self.is_inside:
            with self._deferring(models):
                yield
            return
        self._begin()
        self.is_inside = True
        try:
            with self._deferring(models):
                yield
        except BaseException:
            self._take_back()
            raise
        finally:
            self.is_inside = False
        xla.flush()
        if self._window.is_full:
            self.counters.micro_step = 0
            self.turns.end_window()
            self.data.end()

    @contextmanager
    def _deferring(self, models: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            if not self._window.is_full:
                self._window.deferred = [*self._window.deferred, *models]
                for model in models:
                    stack.enter_context(deferred(model))
            yield

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Computes the gradients of the loss, divided by the configured number of micro-batches, scaled under fp16."""
        if not hasattr(loss, "backward"):
            raise UsageError(
                f"backward: the loss must be a tensor (got {type(loss).__name__}); give the loss itself, as "
                "outputs.loss of a model's outputs, and not what item() returns."
            )
        if not getattr(loss, "requires_grad", True):
            raise UsageError(
                "backward: the loss depends on nothing that is trained (got a tensor without requires_grad); compute "
                "it from the prepared model's output, outside of torch.no_grad(), and with "
                "accelerator.gather_with_gradients in place of gather or reduce, whose results have no gradients."
            )
        self.boundaries.before_batch()
        self.turns.before_backward()
        progress.post("backward", self.counters.step)
        if not (self.is_inside and self._window.full_size > 1):
            # Earlier gradients of this window, of an optimizer yet to step, have the old scale.
            self.loss_scale.before_backward()
        if not self.is_inside:
            self._window.full_size = 0
        self._backwards = replace(self._backwards, own=self._backwards.own + 1)
        self.events.on_loss(loss)
        divisor = self._window.planned_size if self.counters.micro_step else self.steps
        if divisor > 1:
            loss = loss / divisor
        self._is_own_backward = True
        try:
            self.loss_scale.scaled(loss).backward(**arguments)
        finally:
            self._is_own_backward = False

    def note_backward(self, model: nn.Module) -> None:
        """Notes that a backward through a prepared model has ended, regardless of the caller."""
        if self.deferred_gradients.is_finishing:
            return
        self.turns.note_backward(model)
        progress.note_backward(self.counters.step)
        is_early = self.is_inside and not self._window.is_full
        parts = (part for one in self._window.deferred for part in one.modules())  # accumulate() may get a wrapper
        is_deferred = is_early and any(model is part for part in parts)
        self.deferred_gradients.note_backward(model, is_deferred or not reduces(model))
        is_in_loop = active_loader(self.loaders) is not None
        for loader in self.loaders:
            loader.note_backward(is_in_loop)
        self._backwards = replace(
            self._backwards,
            by_script=self._backwards.by_script + (not self._is_own_backward),
            through_models=self._backwards.through_models + 1,
        )

    @property
    def gradient_moment(self) -> tuple[str, int]:
        """The event for which gradients are finalized once: the complete window, or outside of windows the last
        backward.

        Several optimizers may alternate in a window, so a backward in it may belong to another optimizer.
        """
        return ("window", self.full_windows) if self._window.full_size else ("backward", self.backwards)

    @property
    def backwards(self) -> int:
        """All backwards so far."""
        return self._backwards.all

    def shortfall(self) -> float:
        """The factor that gradients still need: more than 1 in a short window. Gradients of a manual `loss.backward()`
        were not divided, so they are a sum."""
        is_divided = self._backwards.since(self._window.before).own > 0
        planned, actual = self._window.planned_size, self._window.full_size
        return planned / actual if is_divided and 0 < actual < planned else 1.0

    def complete_window(self) -> None:
        """Closes a window that the loop has left early: its micro-batches become a short window."""
        if self._window.is_full or self.is_gathering():
            return
        self._window.is_full = True
        self._window.full_size = self.counters.micro_step
        self.full_windows += 1

    def unscale(self, optimizer: torch.optim.Optimizer, others: Sequence[torch.optim.Optimizer]) -> None:
        """Removes fp16's loss scale from the optimizer's gradients, but for parameters that the others have, too, which
        have removed it. UsageError where they never had it."""
        new = self._backwards.since(self._at_step)
        if self.loss_scale.is_on and new.by_script:
            raise UsageError(
                "optimizer step: gradients lack the loss scale that fp16 needs (got a call of loss.backward()); call "
                "accelerator.backward(loss)."
            )
        self.loss_scale.unscale(optimizer, new.own > 0, others)

    @property
    def micro_batches_of_window(self) -> int:
        """Micro-batches that the present window was to have when it began."""
        return self._window.planned_size

    @property
    def backwards_outside_windows(self) -> int:
        """Backwards since the last step, of a loop without `accumulate()`; 0 in a window."""
        return 0 if self._window.full_size else self._backwards.since(self._at_step).all

    @property
    def has_scaled_gradients(self) -> bool:
        """Whether the gradients still have fp16's loss scale, since no prepared optimizer has stepped on them."""
        new = self._backwards.since(self._at_step)
        return self.loss_scale.is_on and new.own > 0 and not new.by_script

    def defers(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether this is no last micro-batch, so that gradients of any of the parameters are not final."""
        if not (self.is_inside and self.is_gathering()):
            return False
        trained = {id(parameter) for parameter in parameters}
        return any(id(p) in trained for model in self._window.deferred for p in every_parameter(model))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, a prepared optimizer steps; steps of inner optimizers do not count."""
        found, self.is_stepping, self.thread = self.is_stepping, True, threading.current_thread()
        try:
            yield
        finally:
            self.is_stepping = found

    def note_step(self, optimizer: torch.optim.Optimizer, was_skipped: bool) -> None:
        """Counts steps: the first optimizer that steps begins a step, and one that steps again begins the next."""
        xla.flush()
        self.loss_scale.note_step()
        micro_batches = max(1, self._backwards.since(self._at_step).all)
        for _ in range(micro_batches):  # those of a loop without accumulate()
            self._note_batch(micro_batches)
        self.counters.end_step()
        self._has_stepped_in_micro_batch = True
        self._at_step = self._backwards
        self.data.end()
        current = active_loader(self.loaders)
        self.boundaries.note_step(current, is_repeated=optimizer in self._stepped)
        if current is not None:
            last = [loop for loader in self.loaders if (loop := loader.newest_loop) and loop.is_at_its_end]
            for loader in self.loaders:
                loader.note_step(current.last_yield, last)
        if was_skipped:
            return
        if optimizer in self._stepped:
            self._stepped.clear()
        if not self._stepped:
            self.counters.step += 1
            self.events.on_step()
        self._stepped.add(optimizer)

    def note_optimizer(self) -> None:
        """Notes a newly prepared optimizer: its first step counts as a new step."""
        self._stepped.clear()

    def is_open(self) -> bool:
        """Whether unused gradients belong to a window that is still open, so that zero_grad must keep them.

        Loops call zero_grad at the end of a micro-batch or at its start. In the last one of a window, before its
        backward or while several optimizers alternate, the gradients of earlier micro-batches are still needed.
        """
        if self.is_gathering():
            is_assigned = hooks.times_returned() > self._window.returned_before  # a script may have, in this window
            return is_assigned or self._backwards.since(self._window.before).all > 0
        if self._window.full_size <= 1 or not self.is_inside:
            return False
        return not self._backwards.since(self._before_micro_batch).all or self._has_stepped_in_micro_batch

    def before_loop(self, loader: PreparedLoader) -> None:
        """Called by a loader when a loop begins. A loader that the script took out of the prepared ones is one again:
        it ends windows, and knows which of its samples are padding."""
        progress.begin_loop()
        if loader not in self.loaders:
            self.loaders.append(loader)
        self.data.keep_random_states(one for one in self.loaders if one is not loader or loader.keeps_unused)

    def after_batch(self, loader: PreparedLoader) -> None:
        """Called by a loader when the loop requests the next batch: the previous one is done."""
        progress.post("data", self.counters.step)
        xla.flush()
        by_hand = 0 if self._stepped or not self._window.is_full else self._backwards.all
        self.boundaries.after_batch(loader, is_window_open=self.counters.micro_step > 0, backwards_by_hand=by_hand)
        self.data.keep_random_states(self.loaders)

    @eager
    def _begin(self) -> None:
        self.boundaries.before_batch()
        progress.post("forward", self.counters.step)
        if self.counters.micro_step == 0:
            self._window = _Window(self.steps, self._backwards, hooks.times_returned())
        else:
            self._check_kept()
        self.turns.begin_micro_batch()
        self._before_micro_batch = self._backwards
        self._has_stepped_in_micro_batch = False
        self.counters.micro_step += 1
        self.micro_batches += 1
        window = self._window
        loader = self.data.begin_micro_batch(window.planned_size)
        is_last = self.ends_with_data and self.data.ends_window
        window.loader, window.deferred = loader, ()
        window.is_full = is_last or self.counters.micro_step >= window.planned_size
        window.full_size = self.counters.micro_step if window.is_full else 0
        self.full_windows += window.is_full
        if not window.is_full:
            self.data.keep_open()
        self._note_batch(window.planned_size)

    @eager
    def _take_back(self) -> None:
        """The window is as before the present micro-batch, unless this one has stepped."""
        if self.counters.micro_step:
            self.counters.micro_step -= 1
            self._window.is_full, self._window.full_size = self.counters.micro_step == 0, 0

    def _check_kept(self) -> None:
        """Raises UsageError where the gradients of this window's earlier micro-batches are gone."""
        had_backwards = self._backwards.since(self._window.before).through_models > 0
        has_any = self.turns.has_set_aside() or any(map(has_gradients, self.models))
        if had_backwards and not self._has_stepped_in_micro_batch and not has_any:
            raise UsageError(
                "accumulate: the gradients of the window's earlier micro-batches are gone (got maybe a call of "
                "model.zero_grad()); call zero_grad() of the prepared optimizer, which waits for the end of the window."
            )

    def _note_batch(self, micro_batches: int) -> None:
        """Counts the samples of a micro-batch as trained on. `micro_batches`: of the step, which may have been read
        ahead."""
        loader = active_loader(self.loaders)
        samples = None if loader is None else loader.take_trained(micro_batches)
        if samples is not None:
            self.counters.add_samples(samples)
            self.events.on_batch()
