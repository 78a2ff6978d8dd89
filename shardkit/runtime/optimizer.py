"""The prepared optimizer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardkit.distributed import collectives, progress
from shardkit.distributed.tensors import local_part
from shardkit.errors import ShardkitError, UsageError
from shardkit.log import get_logger
from shardkit.optim.clip import are_mixed, multiply_gradients_, zero_gradients_
from shardkit.optim.host_state import move_to_host
from shardkit.optim.kernels import forget_choice, parameters_of
from shardkit.optim.plain_step import Operations, PlainStep, Stepper
from shardkit.optim.rebind import same_objects
from shardkit.optim.stepping import stepper_of
from shardkit.runtime.eager import eager
from shardkit.runtime.forwarding import Forwarding
from shardkit.runtime.steps.accumulate import NEVER, Accumulation

log = get_logger(__name__)


class AcceleratedOptimizer(Forwarding, torch.optim.Optimizer):
    """The user's optimizer, which does nothing while micro-batches are accumulated. `optimizer` is the torch object.

    It subclasses torch's Optimizer only because schedulers check for it; everything except step and zero_grad is
    forwarded, also attributes that are set, as a GradScaler of the script does for fused kernels.
    """

    _inside = "optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: Accumulation) -> None:
        self.step_was_skipped = False
        self.steps_taken = 0
        """Steps so far in this process, without those that fp16 skipped."""
        self.accumulation = accumulation
        """The accumulation windows in which it steps."""
        self._stepper: Stepper = PlainStep(optimizer)
        self._followed: list[torch.Tensor] = []
        """The parameters that were checked, and for which the stepper was chosen."""
        self._final_at = NEVER
        self._final_after = 0
        """The backwards so far when its gradients were last made final."""
        self._has_used_gradients = False
        self._stepped_at = NEVER
        self._has_stepped = False
        self.optimizer = optimizer
        accumulation.optimizers.add(self)

    def __repr__(self) -> str:
        return f"Accelerated{self.optimizer!r}"

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, of parameters of prepared models; those taken before `prepare` are replaced by the present
        ones. UsageError, without the group, where they belong to no prepared model."""
        self.optimizer.add_param_group(param_group)
        try:
            self.accumulation.events.on_new_group()
        except ShardkitError:
            self.optimizer.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, without the kernels that were chosen for this run: a script may compare settings, or
        load them in a run that has others."""
        state = self.optimizer.state_dict()
        if getattr(self.optimizer, "_shardkit_chooses", False):
            forget_choice(self.optimizer, state.get("param_groups", ()))
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        move_to_host(self.optimizer)  # where its state is kept there: torch has loaded it to the parameters' device

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, of all groups."""
        return [*parameters_of(self.optimizer)]

    def follow_parameters(self) -> None:
        """Chooses how to step on the optimizer's current parameters. UsageError where the optimizer cannot."""
        self._stepper = stepper_of(self.optimizer, _operations)
        self._followed = self.parameters

    def _follow_changed_groups(self) -> None:
        """As `add_param_group`, where the script has changed the lists of param groups, or those of the optimizer
        inside. UsageError where the parameters belong to no prepared model."""
        if not same_objects(self.parameters, self._followed):
            self.accumulation.events.on_new_group()

    @eager
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the window's gradients; does nothing while the window is not full or where fp16 overflowed."""
        if closure is not None:
            self._refuse_closure()
        if self.accumulation.is_gathering():
            self.accumulation.events.before_skipped_step()
            self._has_used_gradients = False  # those of the last step are gone by now, maybe by `model.zero_grad()`
            self.accumulation.turns.end(self)
            return None
        progress.post("optimizer step", self.accumulation.counters.step)
        self._follow_changed_groups()
        self.make_gradients_final()
        self.accumulation.events.before_step(self.optimizer)
        self.step_was_skipped = self.accumulation.loss_scale.overflowed(self.optimizer)
        if not self._has_stepped and closure is None:
            self._has_stepped = True
            self._warn_without_gradients()  # before the step: some optimizers drop gradients in it
        result = None
        if not self.step_was_skipped:
            with self.accumulation.stepping():
                result = self._stepper.step(None if closure is None else lambda: _mean(closure()))
            self.steps_taken += 1
        self._has_used_gradients, self._stepped_at = True, self.accumulation.gradient_moment
        self._final_at = NEVER
        self.accumulation.note_step(self.optimizer, self.step_was_skipped)
        progress.post("after optimizer step", self.accumulation.counters.step)
        return result

    @eager
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, from any place in the loop; does nothing while the window still needs them: from its
        first backward until this optimizer steps. Gradients of an earlier step are never needed. None: as the optimizer
        does by itself, which may take no argument, or keep zeros."""
        turns = self.accumulation.turns
        turns.note_zero_grad(self)
        has_stepped_in_window = self._stepped_at == self.accumulation.gradient_moment
        if self._has_used_gradients or has_stepped_in_window or not self.accumulation.is_open():
            self.drop_gradients(set_to_none)
        else:
            turns.keep_own(self, is_last=not self.accumulation.is_gathering())

    def drop_gradients(self, set_to_none: bool | None = None) -> None:
        """Drops the gradients, also those that wait for their reduction."""
        self._has_used_gradients = False
        self.accumulation.turns.drop(self)
        if self._final_at != NEVER:
            self._final_at = NEVER
            self.accumulation.loss_scale.note_dropped()
        self.accumulation.deferred_gradients.drop(lambda: self.parameters)
        if set_to_none is None:
            self.optimizer.zero_grad()
        elif not set_to_none and are_mixed(self.parameters):
            zero_gradients_(self.parameters)
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def make_gradients_final(self) -> None:
        """Makes gradients equal to those of one process: unscaled, and the mean over the window. Idempotent."""
        self.accumulation.complete_window()
        if not self.accumulation.is_gathering():
            self.accumulation.turns.join(self)
            self.accumulation.deferred_gradients.finish(lambda: self.parameters)
        moment = self.accumulation.gradient_moment
        if self._final_at == moment:
            return
        others = self._others_with_final_gradients()
        final = {id(p) for one in others for p in one.parameters}
        self.accumulation.unscale(self.optimizer, [one.optimizer for one in others])
        self._final_at, self._final_after = moment, self.accumulation.backwards
        factor = self.accumulation.shortfall()
        if factor != 1.0:
            multiply_gradients_([p for p in self.parameters if id(p) not in final], factor)

    def _others_with_final_gradients(self) -> "list[AcceleratedOptimizer]":
        """Other optimizers of some of the same parameters, such as the one before a change from AdamW to SGD, by which
        the gradients of those are final already."""
        now = self.accumulation.backwards
        final = [one for one in self.accumulation.optimizers if one is not self and one._final_after == now > 0]
        own = {*map(id, self.parameters)} if final else set()
        return [one for one in final if not own.isdisjoint(map(id, one.parameters))]

    def _refuse_closure(self) -> None:
        """UsageError where a closure would not be called, or where its gradients would not be unscaled."""
        if self.accumulation.loss_scale.is_on:
            raise UsageError(
                "optimizer step: the closure's gradients would keep fp16's loss scale (got mixed_precision fp16); use "
                "bf16, or call backward before step() in place of the closure."
            )
        if self.accumulation.is_gathering():
            raise UsageError(
                "optimizer step: the closure would not be called before the last micro-batch of a window, and its "
                f"samples would be lost (got micro-batch {self.accumulation.counters.micro_step} of "
                f"{self.accumulation.steps}); call backward before step() in place of the closure, or compute all "
                "micro-batches in the closure, outside of accumulate()."
            )

    def _warn_without_gradients(self) -> None:
        parameters = self.parameters
        if parameters and all(parameter.grad is None for parameter in parameters):
            log.warning(
                "optimizer: no parameter had a gradient in the first step of %s (%d parameters), so it changes "
                "nothing; compute the loss with the prepared model, and call backward() before step().",
                type(self.optimizer).__name__,
                len(parameters),
            )


def _operations() -> Operations:
    from shardkit.sharding.tensors.settled import Settled  # imports DTensor, which a run without sharding does not need

    return Settled()


def _mean(loss: Any) -> Any:
    """The mean over all ranks of a closure's result, so that an optimizer that depends on it acts the same on all
    ranks."""
    if isinstance(loss, float):
        return collectives.mean_number(loss)
    if not (isinstance(loss, torch.Tensor) and dist.is_initialized() and dist.get_world_size() > 1):
        return loss
    total = local_part(loss).clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
