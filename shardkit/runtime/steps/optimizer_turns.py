"""Several optimizers that take turns in the micro-batches of a window, as those of a generator and its discriminator.

While a window is filled, `step` and `zero_grad` do nothing. In a loop without windows they also separate an optimizer's
own gradients from those that other losses leave at its parameters: the generator's loss goes through the discriminator.
Here these are told apart: gradients between an optimizer's step and its next zero_grad are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardkit.distributed.modules import every_parameter
from shardkit.sharding.taken_gradients import TakenGradients, add_back, put_back, take


class Stepping(Protocol):
    """A prepared optimizer."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]: ...

    def drop_gradients(self) -> None: ...


@dataclass
class _Turn:
    """What an optimizer was asked in the present micro-batch, and gradients of its own that are set aside."""

    has_zeroed: bool = False
    """By `zero_grad`, before its step."""
    has_stepped: bool = False
    """By a `step` that the window has skipped: gradients from now on are not its own."""
    has_zeroed_since: bool = False
    is_waiting: bool = False
    """The step was in the micro-batch before; a `zero_grad`, as the one before that step, begins the next turn."""
    aside: TakenGradients | None = None

    def give(self, back: Callable[[TakenGradients], None]) -> None:
        """Gives what is set aside by `put_back` or `add_back`."""
        if self.aside is not None:
            back(self.aside)
            self.aside = None


class OptimizerTurns:
    """The turns in the present window."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._turns = WeakKeyDictionary[Stepping, _Turn]()
        self._asked: list[Stepping] = []
        """Those with a `zero_grad` before their step in the window's last micro-batch, and no backward since: it began
        their turn, or they do not step in this window."""

    def begin_micro_batch(self) -> None:
        for optimizer, turn in [*self._turns.items()]:
            if turn.has_zeroed and turn.has_stepped and not turn.has_zeroed_since:
                turn.is_waiting, turn.has_zeroed = True, False
            else:
                self.join(optimizer)

    def end(self, optimizer: Stepping) -> None:
        """Notes a step that the window has skipped."""
        turn = self._turns.setdefault(optimizer, _Turn())
        turn.give(add_back)
        turn.has_stepped, turn.has_zeroed_since, turn.is_waiting = True, False, False

    def before_backward(self) -> None:
        for optimizer, turn in self._turns.items():
            if turn.has_stepped and turn.aside is None:
                turn.aside = take(self._models, optimizer.parameters)

    def note_backward(self, model: nn.Module) -> None:
        if self._asked:
            reached = {id(parameter) for parameter in every_parameter(model)}
            self._asked = [one for one in self._asked if not any(id(p) in reached for p in one.parameters)]

    def note_zero_grad(self, optimizer: Stepping) -> None:
        """Notes any `zero_grad`."""
        turn = self._turns.setdefault(optimizer, _Turn())
        if turn.has_stepped and not turn.is_waiting:
            turn.has_zeroed_since = True
        else:
            turn.has_zeroed, turn.has_stepped, turn.is_waiting = True, False, False

    def keep_own(self, optimizer: Stepping, is_last: bool) -> None:
        """Drops gradients that are not of the optimizer's own turns, at a `zero_grad` while the window still needs
        these. `is_last`: in the window's last micro-batch."""
        self._turns[optimizer].give(put_back)
        if is_last:
            self._asked.append(optimizer)

    def join(self, optimizer: Stepping) -> None:
        """Before an optimizer steps: gradients that no `zero_grad` has dropped are its own, as in one process."""
        if (turn := self._turns.pop(optimizer, None)) is not None:
            turn.give(add_back)
        self._asked = [one for one in self._asked if one is not optimizer]

    def drop(self, optimizer: Stepping) -> None:
        """Drops what is set aside: the optimizer's gradients are not needed any more."""
        if (turn := self._turns.get(optimizer)) is not None:
            turn.aside = None

    def end_window(self) -> None:
        """At the end of the last micro-batch."""
        asked, self._asked = self._asked, []
        for optimizer in [*self._turns]:
            self.join(optimizer)
        for optimizer in asked:
            optimizer.drop_gradients()

    def has_set_aside(self) -> bool:
        """Whether parameters lack gradients because they are set aside."""
        return any(turn.aside is not None for turn in self._turns.values())
