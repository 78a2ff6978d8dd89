"""Several optimizers that take turns in the micro-batches of a window, as those of a generator and its discriminator.

While a window is filled, `step` and `zero_grad` do nothing. In one process with one large batch they also separate an
optimizer's own gradients from those that other losses leave at its parameters: the generator's loss goes through the
discriminator. Here these are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn

from shardkit.distributed.tensors import every_parameter
from shardkit.sharding.taken_gradients import TakenGradients, add_back, put_back, take

if TYPE_CHECKING:
    from shardkit.runtime.optimizer import AcceleratedOptimizer


class Turns:
    """The optimizers' turns in the present window. An optimizer's turn ends with `step`; its next one begins with
    `zero_grad`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._ended: list[AcceleratedOptimizer] = []
        """Those with a `step` that the window has skipped, and no `zero_grad` since."""
        self._set_aside: dict[AcceleratedOptimizer, TakenGradients] = {}
        """Gradients of the turns of those that have ended, since another loss was computed."""
        self._zeroed = WeakSet["AcceleratedOptimizer"]()
        """Those with a `zero_grad` since the micro-batch began. Loops without any sum up all gradients."""
        self._asked: list[AcceleratedOptimizer] = []
        """Those with a `zero_grad` before their step in the window's last micro-batch, and no backward since: it began
        their turn, or they do not step in this window."""

    def begin_micro_batch(self) -> None:
        for optimizer in [one for one in self._ended if one not in self._zeroed]:
            self.join(optimizer)
        self._zeroed.clear()

    def end(self, optimizer: AcceleratedOptimizer) -> None:
        """Notes a step that the window has skipped."""
        self.join(optimizer)
        self._ended.append(optimizer)

    def before_backward(self) -> None:
        for optimizer in self._ended:
            if optimizer not in self._set_aside:
                self._set_aside[optimizer] = take(self._models, optimizer.parameters)

    def note_backward(self, model: nn.Module) -> None:
        if self._asked:
            reached = {id(parameter) for parameter in every_parameter(model)}
            self._asked = [one for one in self._asked if not any(id(p) in reached for p in one.parameters)]

    def note_zero_grad(self, optimizer: AcceleratedOptimizer) -> None:
        """Notes any `zero_grad`."""
        self._zeroed.add(optimizer)

    def begin(self, optimizer: AcceleratedOptimizer, is_last: bool) -> None:
        """Notes a `zero_grad` that comes while the window still needs the gradients of the optimizer's own turns: only
        the others' are dropped. `is_last`: in the window's last micro-batch."""
        if (taken := self._set_aside.pop(optimizer, None)) is not None:
            put_back(taken)
        self._forget(optimizer)
        if is_last:
            self._asked.append(optimizer)

    def join(self, optimizer: AcceleratedOptimizer) -> None:
        """Before an optimizer steps: what no `zero_grad` has dropped is part of its gradients, as in one process."""
        if (taken := self._set_aside.pop(optimizer, None)) is not None:
            add_back(taken)
        self._forget(optimizer)

    def drop(self, optimizer: AcceleratedOptimizer) -> None:
        """Drops what is set aside: the optimizer's gradients are not needed any more."""
        self._set_aside.pop(optimizer, None)
        self._forget(optimizer)

    def end_window(self) -> None:
        """At the end of the last micro-batch."""
        for optimizer in [*self._set_aside]:
            self.join(optimizer)
        asked, self._asked, self._ended = self._asked, [], []
        for optimizer in asked:
            optimizer.drop_gradients()

    def has_set_aside(self) -> bool:
        """Whether parameters lack gradients because they are set aside."""
        return bool(self._set_aside)

    def _forget(self, optimizer: AcceleratedOptimizer) -> None:
        self._ended = [one for one in self._ended if one is not optimizer]
        self._asked = [one for one in self._asked if one is not optimizer]
