"""Micro-batches into optimizer steps: when gradients are exchanged, what a loss is divided by, what a step means.

A window is the micro-batches of one optimizer step: as many as asked for, or fewer where the loader ends. Its gradient
is the mean over its micro-batches, so a window of n equals one process that sees its n micro-batches at once, short
windows included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.distributed import progress
from shardkit.distributed.tensors import local_part
from shardkit.sharding.parallel import gradient_sync

NEVER = ("never", -1)


@dataclass
class Counters:
    """How far the run is. Equal on all ranks."""

    step: int = 0
    """Optimizer steps done; one that fp16 skipped does not count."""

    micro_step: int = 0
    """Micro-batches since the last optimizer step."""

    samples_seen: int = 0
    """Samples trained on, over all ranks."""


class Accumulation:
    """Where the loop is in its window of micro-batches. One an Accelerator; optimizers and scheduler share it."""

    def __init__(self, steps: int, loaders: Sequence[PreparedLoader], scaler: torch.amp.GradScaler | None) -> None:
        self.steps = steps
        self.sync_gradients = True
        self.counters = Counters()
        self.backward_calls = 0
        self.at_boundary: Callable[[], None] = lambda: None
        self._loaders = loaders
        self._scaler = scaler
        self._scaler_is_behind = False
        self._divisor = steps
        self._window = 0
        self._windows = 0
        self._is_inside = False
        self._stepped: set[int] = set()
        self._has_stepped_in_micro_batch = False
        self._calls_before_window = 0
        self._calls_before_micro_batch = 0
        self._batch_counted = 0
        self._samples_since_step = 0
        self._have_ranks_met = False
        self._boundary_is_due = False
        self._boundary_loader: PreparedLoader | None = None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler under fp16, up to date with the last step; else None."""
        self._update_scaler()
        return self._scaler

    @contextmanager
    def micro_batch(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """One micro-batch, forward to zero_grad. Before the window's last, see `deferred` for what is exchanged."""
        self._begin()
        self._is_inside = True
        try:
            with ExitStack() as stack:
                if not self.sync_gradients:
                    for model in models:
                        stack.enter_context(deferred(model))
                yield
        finally:
            self._is_inside = False
        if self.sync_gradients:
            self.counters.micro_step = 0

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Gradients of the loss, divided by the window's nominal number of micro-batches, scaled under fp16."""
        self._pass_boundary_without_loader()
        progress.post("backward", self.counters.step)
        if not (self._is_inside and self._window > 1):
            # Gradients of a window's earlier micro-batches, of an optimizer yet to step, have the old scale.
            self._update_scaler()
        if not self._is_inside:
            self._window = 0
        self.backward_calls += 1
        divisor = self._divisor if self.counters.micro_step else self.steps
        if divisor > 1:
            loss = loss / divisor
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(**arguments)

    @property
    def gradient_moment(self) -> tuple[str, int]:
        """What gradients are made final for, once: the window that is complete, outside of any the newest backward.

        Several optimizers may take turns in a window, so that a backward in it need not be this optimizer's.
        """
        return ("window", self._windows) if self._window else ("backward", self.backward_calls)

    def shortfall(self) -> float:
        """What gradients still have to be multiplied with: more than 1 in a window that the loader's end cut short."""
        return self._divisor / self._window if 0 < self._window < self._divisor else 1.0

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the loss scale out of the optimizer's gradients; nothing without fp16."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether fp16 gradients, unscaled before, are not finite on any rank. Collective under fp16."""
        if self._scaler is None:
            return False
        found = list(self._scaler._found_inf_per_device(optimizer).values())
        for value in found:
            if dist.is_initialized() and dist.get_world_size() > 1:
                # Sharded gradients agree by themselves; ignored modules' do not, and the scale must.
                dist.all_reduce(value, dist.ReduceOp.MAX)
        return any(bool(value.item()) for value in found)

    def note_step(self, optimizer: torch.optim.Optimizer, was_skipped: bool) -> None:
        """Counts: the first optimizer to step opens a step, one that steps again opens the next."""
        self._scaler_is_behind = self._scaler is not None
        self._note_batch()
        self._samples_since_step = 0
        self.counters.micro_step = 0
        self._has_stepped_in_micro_batch = True
        self._boundary_is_due = True
        self._boundary_loader = active_loader(self._loaders)
        if self._boundary_loader is not None:
            for loader in self._loaders:
                loader.note_step(self._boundary_loader.last_yield)
        if was_skipped:
            return
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        if not self._stepped:
            self.counters.step += 1
        self._stepped.add(id(optimizer))

    def state_dict(self) -> dict[str, int]:
        """What a save keeps of the counters: samples up to the last optimizer step, as the loaders' positions are."""
        return {"step": self.counters.step, "samples_seen": self.counters.samples_seen - self._samples_since_step}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """What `state_dict` gave; a window of micro-batches starts anew."""
        self.counters.step, self.counters.samples_seen = saved["step"], saved["samples_seen"]
        self.counters.micro_step = self._samples_since_step = 0

    def is_open(self) -> bool:
        """Whether gradients that no step has used yet belong to a window still open, so that zero_grad must leave them.

        Loops call zero_grad at the end of a micro-batch or at its start. In a window's last one, before its backward
        or while several optimizers take turns, the gradients of the micro-batches before are still to be used.
        """
        if not self.sync_gradients:
            return self.backward_calls > self._calls_before_window
        if self._window <= 1:
            return False
        return self.backward_calls == self._calls_before_micro_batch or self._has_stepped_in_micro_batch

    def note_meeting(self) -> None:
        """All ranks have just exchanged something: they go through this batch together."""
        self._have_ranks_met = True

    def after_batch(self, loader: PreparedLoader) -> None:
        """What a loader calls when the loop comes back for more: all that belongs to the batch before is done.

        A boundary is one after a training step; or a batch of another loop, an evaluation, in which all ranks met and
        no window is open. (A loop that rank 0 runs alone must not wait for the others.)
        """
        progress.post("data", self.counters.step)
        met, self._have_ranks_met = self._have_ranks_met, False
        if self._boundary_is_due and loader is self._boundary_loader:
            self._boundary_is_due = False
            self.at_boundary()
        elif met and loader is not self._boundary_loader and self.counters.micro_step == 0:
            self.at_boundary()

    def _begin(self) -> None:
        self._pass_boundary_without_loader()
        progress.post("forward", self.counters.step)
        if self.counters.micro_step == 0:
            self._divisor = self.steps
            self._calls_before_window = self.backward_calls
        self._calls_before_micro_batch = self.backward_calls
        self._has_stepped_in_micro_batch = False
        self.counters.micro_step += 1
        loader = active_loader(self._loaders)
        is_last = loader is not None and loader.end_of_loader
        self.sync_gradients = is_last or self.counters.micro_step >= self._divisor
        self._window = self.counters.micro_step if self.sync_gradients else 0
        self._windows += self.sync_gradients
        self._note_batch()

    def _note_batch(self) -> None:
        """The batch that is out is trained on: its samples count, once."""
        loader = active_loader(self._loaders)
        if loader is not None and loader.last_yield != self._batch_counted:
            self._batch_counted = loader.last_yield
            self.counters.samples_seen += loader.batch_samples
            self._samples_since_step += loader.batch_samples

    def _update_scaler(self) -> None:
        """A new scale holds from the next backward on: optimizers that have not stepped yet still need the old one."""
        if self._scaler is not None and self._scaler_is_behind:
            self._scaler_is_behind = False
            self._scaler.update()

    def _pass_boundary_without_loader(self) -> None:
        if self._boundary_is_due and self._boundary_loader is None:
            self._boundary_is_due = False
            self.at_boundary()


def deferred(model: nn.Module) -> AbstractContextManager[None]:
    """For micro-batches before a window's last: DDP exchanges nothing; FSDP still reduces to its shards, or every rank
    would hold a whole model's gradients, but replicas wait with theirs."""
    return _without_all_reduce(model) if isinstance(model, FSDPModule) else gradient_sync([model], enabled=False)


@contextmanager
def _without_all_reduce(model: FSDPModule) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """The user's optimizer, doing nothing while micro-batches are gathered. `optimizer` is the torch one.

    It is a torch Optimizer by class only, because schedulers insist; everything but step and zero_grad is the torch
    one's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: Accumulation) -> None:
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._accumulation = accumulation
        self._final_at = NEVER
        self._has_used_gradients = False

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"Accelerated{self.optimizer!r}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, of all groups."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the window's gradients; nothing while the window is not full, or where fp16 overflowed."""
        if not self._accumulation.sync_gradients:
            return None
        progress.post("optimizer step", self._accumulation.counters.step)
        self.make_gradients_final()
        self.step_was_skipped = self._accumulation.overflowed(self.optimizer)
        result = None
        if not self.step_was_skipped:
            result = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._has_used_gradients, self._final_at = True, NEVER
        self._accumulation.note_step(self.optimizer, self.step_was_skipped)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, wherever in the loop it stands; nothing while the window still needs them."""
        if self._has_used_gradients or not self._accumulation.is_open():
            self._has_used_gradients = False
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def make_gradients_final(self) -> None:
        """Gradients as one process would have them: no loss scale, the mean over the window. Repeatable."""
        moment = self._accumulation.gradient_moment
        if self._final_at == moment:
            return
        self._final_at = moment
        self._accumulation.unscale(self.optimizer)
        factor = self._accumulation.shortfall()
        if factor != 1.0:
            multiply_gradients_(self.parameters, factor)


def multiply_gradients_(parameters: Sequence[torch.Tensor], factor: float) -> None:
    """Multiplies, in place, the gradient of each parameter that has one."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


def clamp_gradients_(parameters: Sequence[torch.Tensor], limit: float) -> None:
    """Clamps, in place, every element of the parameters' gradients to [-limit, limit]."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-limit, limit)
