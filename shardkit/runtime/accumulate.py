"""Gradient accumulation: when gradients are reduced, what the loss is divided by, and what counts as a step.

A window is the micro-batches of one optimizer step: the configured number, or fewer where the loader ends. Its gradient
is the mean over its micro-batches, so a window of n, also a short one, equals one batch of its n micro-batches.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.distributed import progress, xla
from shardkit.errors import UsageError
from shardkit.runtime.boundaries import Boundaries
from shardkit.runtime.deferred_gradients import DeferredGradients
from shardkit.runtime.step_events import StepEvents
from shardkit.sharding.gradient_sync import deferred, has_gradients
from shardkit.sharding.mixed_losses import keep_plain

NEVER = ("never", -1)


@dataclass
class Counters:
    """The run's progress. Equal on all ranks."""

    step: int = 0
    """Optimizer steps done, without those that fp16 skipped."""

    micro_step: int = 0
    """Micro-batches since the last optimizer step."""

    samples_seen: int = 0
    """Samples trained on, over all ranks."""


class Accumulation:
    """The state of the current window. One per Accelerator, shared by optimizers and schedulers."""

    def __init__(
        self,
        steps: int,
        models: Sequence[nn.Module],
        loaders: list[PreparedLoader],
        scaler: torch.amp.GradScaler | None,
        counters: Counters,
        events: StepEvents,
        ends_with_data: bool = True,
    ) -> None:
        self.steps = steps
        self.ends_with_data = ends_with_data
        """Whether the last batch of a loader ends a window early; else the window continues in the next loop."""
        self.models = models
        self.counters = counters
        self.backward_calls = 0
        self.events = events
        self.boundaries = Boundaries(events)
        self._loaders = loaders
        self._is_full = True
        self._deferred_models: Sequence[nn.Module] = ()
        self.deferred_gradients = DeferredGradients()
        self._loader_of_window: PreparedLoader | None = None
        self.is_stepping = False
        """Whether a prepared optimizer is stepping: steps inside it do not count."""
        self._is_own_backward = False
        self._has_foreign_backward = False
        self._model_calls = self._model_calls_before_window = 0
        self._backwards_since_step = 0
        self._own_calls = self._own_calls_before_window = self._own_calls_at_step = 0
        self._scaler = scaler
        self._scaler_is_behind = False
        self._divisor = steps
        self._window = self._windows = 0
        self.is_inside = False
        """Whether the script is inside `accumulate()`."""
        self._stepped: set[int] = set()
        self._has_stepped_in_micro_batch = False
        self._calls_before_window = self._calls_before_micro_batch = 0
        self.micro_batches = 0
        """Micro-batches begun in this process."""
        self._samples_since_step = 0

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler under fp16, up to date with the last step; else None."""
        self._update_scaler()
        return self._scaler

    @property
    def sync_gradients(self) -> bool:
        """Whether the window is full, or there is none, so that optimizers step."""
        return not self.is_gathering()

    def is_gathering(self) -> bool:
        """Whether a window is being filled, so that optimizers and schedulers do not step.

        A window whose loop was left (`break`) is not filled any further.
        """
        if self._is_full:
            return False
        loader = self._loader_of_window
        return self.is_inside or not self.ends_with_data or loader is None or loader.is_iterating

    def declare(self, is_full: bool) -> None:
        """For a loop that counts its micro-batches itself, outside of `micro_batch`: whether this one is the last of
        its window, so that optimizers step. Such a loop also controls when gradients are reduced (`no_sync`)."""
        self._is_full, self._loader_of_window, self._deferred_models = is_full, None, ()

    @contextmanager
    def micro_batch(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Context of one micro-batch, forward to zero_grad. For what is reduced before the window's last one, see
        `deferred`."""
        self._begin()
        self.is_inside = True
        try:
            with ExitStack() as stack:
                if not self._is_full:
                    self._deferred_models = models
                    for model in models:
                        stack.enter_context(deferred(model))
                yield
        finally:
            self.is_inside = False
        xla.flush()
        if self._is_full:
            self.counters.micro_step = 0

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Computes the gradients of the loss, divided by the configured number of micro-batches, scaled under fp16."""
        self.boundaries.before_batch()
        progress.post("backward", self.counters.step)
        if not (self.is_inside and self._window > 1):
            # Earlier gradients of this window, of an optimizer yet to step, have the old scale.
            self._update_scaler()
        if not self.is_inside:
            self._window = 0
        self.backward_calls += 1
        self._backwards_since_step += 1
        self._own_calls += 1
        self.events.on_loss(loss)
        divisor = self._divisor if self.counters.micro_step else self.steps
        if divisor > 1:
            loss = loss / divisor
        keep_plain(loss)
        self._is_own_backward = True
        try:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward(**arguments)
        finally:
            self._is_own_backward = False

    def note_backward(self, model: nn.Module) -> None:
        """Notes that a backward through a prepared model has ended, regardless of the caller."""
        is_early = self.is_inside and not self._is_full
        parts = (part for one in self._deferred_models for part in one.modules())  # accumulate() may get a wrapper
        self.deferred_gradients.note_backward(model, is_early and any(model is part for part in parts))
        self.backward_calls += 1
        self._model_calls += 1
        self._backwards_since_step += not self._is_own_backward
        self._has_foreign_backward |= not self._is_own_backward

    @property
    def gradient_moment(self) -> tuple[str, int]:
        """The event for which gradients are finalized once: the complete window, or outside of windows the last
        backward.

        Several optimizers may alternate in a window, so a backward in it may belong to another optimizer.
        """
        return ("window", self._windows) if self._window else ("backward", self.backward_calls)

    def shortfall(self) -> float:
        """The factor that gradients still need: more than 1 in a short window. Gradients of a manual `loss.backward()`
        were not divided, so they are a sum."""
        if self._own_calls == self._own_calls_before_window:
            return 1.0
        return self._divisor / self._window if 0 < self._window < self._divisor else 1.0

    def complete_window(self) -> None:
        """Closes a window that the loop has left early: its micro-batches become a short window."""
        if self._is_full or self.is_gathering():
            return
        self._is_full = True
        self._window = self.counters.micro_step
        self._windows += 1

    def check_gradients(self) -> None:
        """Raises UsageError or ModelError where an optimizer must not step on the present gradients. Collective in the
        first steps."""
        if self._scaler is not None and self._has_foreign_backward:
            raise UsageError(
                "optimizer step: gradients lack the loss scale that fp16 needs (got a call of loss.backward()); call "
                "accelerator.backward(loss)."
            )
        self.events.before_step()

    @property
    def backwards_outside_windows(self) -> int:
        """Backwards since the last step, of a loop without `accumulate()`; 0 in a window."""
        return 0 if self._window else self._backwards_since_step

    @property
    def has_scaled_gradients(self) -> bool:
        """Whether the gradients still have fp16's loss scale, since no prepared optimizer has stepped on them."""
        is_scaled = self._own_calls > self._own_calls_at_step and not self._has_foreign_backward
        return self._scaler is not None and is_scaled

    def defers(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether this is no last micro-batch, so that gradients of any of the parameters are not final."""
        if not (self.is_inside and self.is_gathering()):
            return False
        trained = {id(parameter) for parameter in parameters}
        return any(id(p) in trained for model in self._deferred_models for p in model.parameters())

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, a prepared optimizer steps; steps of inner optimizers do not count."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscales the optimizer's gradients; does nothing without fp16."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the unscaled fp16 gradients are not finite on any rank."""
        if self._scaler is None:
            return False
        return any(bool(value.item()) for value in self._scaler._found_inf_per_device(optimizer).values())

    def note_step(self, optimizer: torch.optim.Optimizer, was_skipped: bool) -> None:
        """Counts steps: the first optimizer that steps begins a step, and one that steps again begins the next."""
        xla.flush()
        self._scaler_is_behind = self._scaler is not None
        micro_batches = max(1, self._backwards_since_step)
        for _ in range(micro_batches):  # those of a loop without accumulate()
            self._note_batch(micro_batches)
        self._samples_since_step = self._backwards_since_step = 0
        self.counters.micro_step = 0
        self._has_stepped_in_micro_batch = True
        self._has_foreign_backward = False
        self._own_calls_at_step = self._own_calls
        current = active_loader(self._loaders)
        self.boundaries.note_step(current, is_repeated=id(optimizer) in self._stepped)
        if current is not None:
            for loader in self._loaders:
                loader.note_step(current.last_yield)
        if was_skipped:
            return
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        if not self._stepped:
            self.counters.step += 1
            self.events.on_step()
        self._stepped.add(id(optimizer))

    def note_optimizer(self) -> None:
        """Notes a newly prepared optimizer: its first step counts as a new step."""
        self._stepped.clear()

    def state_dict(self) -> dict[str, int]:
        """The counters to save; like the loaders' positions, samples count up to the last optimizer step."""
        return {"step": self.counters.step, "samples_seen": self.counters.samples_seen - self._samples_since_step}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Restores the counters from `state_dict`; the next micro-batch begins a new window."""
        self.counters.step, self.counters.samples_seen = saved["step"], saved["samples_seen"]
        self.counters.micro_step = self._samples_since_step = 0

    def is_open(self) -> bool:
        """Whether unused gradients belong to a window that is still open, so that zero_grad must keep them.

        Loops call zero_grad at the end of a micro-batch or at its start. In the last one of a window, before its
        backward or while several optimizers alternate, the gradients of earlier micro-batches are still needed.
        """
        if self.is_gathering():
            return self.backward_calls > self._calls_before_window
        if self._window <= 1 or not self.is_inside:
            return False
        return self.backward_calls == self._calls_before_micro_batch or self._has_stepped_in_micro_batch

    def before_loop(self, loader: PreparedLoader) -> None:
        """Called by a loader when a loop begins. A loader that the script took out of the prepared ones is one again:
        it ends windows, and knows which of its samples are padding."""
        if loader not in self._loaders:
            self._loaders.append(loader)

    def after_batch(self, loader: PreparedLoader) -> None:
        """Called by a loader when the loop requests the next batch: the previous one is done."""
        progress.post("data", self.counters.step)
        xla.flush()
        by_hand = 0 if self._stepped or not self._is_full else self.backward_calls
        self.boundaries.after_batch(loader, is_window_open=self.counters.micro_step > 0, backwards_by_hand=by_hand)

    def _begin(self) -> None:
        self.boundaries.before_batch()
        progress.post("forward", self.counters.step)
        if self.counters.micro_step == 0:
            self._divisor = self.steps
            self._calls_before_window = self.backward_calls
            self._own_calls_before_window = self._own_calls
            self._model_calls_before_window = self._model_calls
        else:
            self._check_kept()
        self._calls_before_micro_batch = self.backward_calls
        self._has_stepped_in_micro_batch = False
        self.counters.micro_step += 1
        self.micro_batches += 1
        loader = active_loader(self._loaders)
        is_last = self.ends_with_data and loader is not None and loader.end_of_loader
        self._loader_of_window = loader
        self._is_full = is_last or self.counters.micro_step >= self._divisor
        self._window = self.counters.micro_step if self._is_full else 0
        self._windows += self._is_full
        self._note_batch(self._divisor)

    def _check_kept(self) -> None:
        """Raises UsageError where the gradients of this window's earlier micro-batches are gone."""
        had_gradients = self._model_calls > self._model_calls_before_window and not self._has_stepped_in_micro_batch
        if had_gradients and not any(map(has_gradients, self.models)):
            raise UsageError(
                "accumulate: the gradients of the window's earlier micro-batches are gone (got maybe a call of "
                "model.zero_grad()); call zero_grad() of the prepared optimizer, which waits for the end of the window."
            )

    def _note_batch(self, micro_batches: int) -> None:
        """Counts the samples of a micro-batch as trained on. `micro_batches`: of the step, which may have been read
        ahead."""
        loader = active_loader(self._loaders)
        samples = None if loader is None else loader.take_trained(micro_batches)
        if samples is not None:
            self.counters.samples_seen += samples
            self._samples_since_step += samples
            self.events.on_batch()

    def _update_scaler(self) -> None:
        """The new scale applies from the next backward on: optimizers that have not stepped yet need the old one."""
        if self._scaler is not None and self._scaler_is_behind:
            self._scaler_is_behind = False
            self._scaler.update()
