"""Learning-rate schedules that advance once per optimizer step, regardless of the number of ranks or micro-batches."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from shardkit.distributed import collectives
from shardkit.runtime.eager import eager
from shardkit.runtime.forwarding import Forwarding
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.steps.accumulate import Accumulation
from shardkit.signatures import signature


class AcceleratedScheduler(Forwarding):
    """The user's scheduler, which steps when its optimizer has stepped. `scheduler` is the torch object.

    It does not step while micro-batches are accumulated or where fp16 skipped every step of the optimizer since the
    last call, and never once per rank: a schedule counts optimizer steps. With `steps_with_optimizer` False it always
    steps. Other attributes are those of the torch object, also where they are set.
    """

    _inside = "scheduler"

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[AcceleratedOptimizer],
        accumulation: Accumulation,
        steps_with_optimizer: bool = True,
        mean_metric: Callable[[float], float] = collectives.mean_number,
    ) -> None:
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._steps_with_optimizer = steps_with_optimizer
        self._mean_metric = mean_metric
        self._called_after = 0
        self._steps_before = {id(one): one.steps_taken for one in optimizers}
        self.steps_per_call = 1
        """Scheduler steps per call; more than 1 for schedules written in steps of single ranks."""
        self.scheduler = scheduler

    @eager
    def step(self, *args: Any, **arguments: Any) -> None:
        """Advances the learning rate if the optimizer has stepped. A schedule that depends on a metric, such as
        ReduceLROnPlateau, gets the mean of the ranks' metrics, so that all decide the same: collective."""
        is_per_micro_batch = self._note_call()
        if self._steps_with_optimizer:
            if self._accumulation.is_gathering() and is_per_micro_batch:
                return
            if self._note_skip():
                return
        args, arguments = _with_mean_metric(self.scheduler.step, args, arguments, self._mean_metric)
        for _ in range(self.steps_per_call):
            if self.steps_per_call == 1 or self._has_steps_left():
                self.scheduler.step(*args, **arguments)

    def _has_steps_left(self) -> bool:
        """Whether a torch schedule of fixed length has steps left."""
        return getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf"))

    def state_dict(self) -> dict[str, Any]:
        """The torch scheduler's state dict."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads it into the torch scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def _note_call(self) -> bool:
        """Notes a call of `step`. Whether the loop calls it in each micro-batch: not if several have passed since the
        last call, as with once per epoch, where the loop may have left its last window open."""
        now, before = self._accumulation.micro_batches, self._called_after
        self._called_after = now
        return self._accumulation.is_inside or now - before <= 1

    def _note_skip(self) -> bool:
        """Notes the optimizers' steps so far. Whether one has taken none since they were noted last, because fp16
        skipped it."""
        own, before = self._own_optimizers(), self._steps_before
        self._steps_before = {id(one): one.steps_taken for one in own}
        return any(one.step_was_skipped and one.steps_taken == before.get(id(one), 0) for one in own)

    def _own_optimizers(self) -> Sequence[AcceleratedOptimizer]:
        """The optimizer that the scheduler was built on; all of them if that is unknown."""
        built_on = getattr(self.scheduler, "optimizer", None)
        own = [o for o in self._optimizers if built_on is o or built_on is o.optimizer]
        return own or self._optimizers


_METRICS = ("metrics", "metric")
"""Names of the argument of `step` that a schedule decides by, in torch, Transformers and timm."""


def _with_mean_metric(
    step: Callable[..., Any], args: tuple[Any, ...], arguments: dict[str, Any], mean: Callable[[float], float]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `step`, with the mean of all ranks' metrics where it takes one and has got one."""
    if not (args or arguments):
        return args, arguments
    try:
        given = signature(step).bind(*args, **arguments)
    except (TypeError, ValueError):  # the call itself says what is wrong
        return args, arguments
    for name in _METRICS:
        value = given.arguments.get(name)
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            given.arguments[name] = mean(float(value))
    return given.args, given.kwargs
