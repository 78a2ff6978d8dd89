"""Trainings that are stopped at every place, and go on in new objects as if nothing had happened.

Each is built (models, optimizers and what else is saved), and then does steps by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit import Accelerator
from tests.loops.net import Net, adam, evaluate, loss_of
from tests.loops.optimizers import OPTIMIZERS, Averages, Sam, ScheduleFree
from tests.loops.run import Loop, RanksRun, Run, config_of, whole

STEPS = 4


@dataclass
class Parts:
    """What a training is made of. `kept` is saved with it."""

    model: Any
    optimizers: tuple[Any, ...]
    schedule: Any = None
    kept: Any = None


@dataclass(frozen=True)
class Training:
    build: Callable[[Run], Parts]
    step: Callable[[Run, Parts, int], None]
    accumulation: int = 1
    shardkit: Mapping[str, Any] = field(default_factory=dict)


TRAININGS: dict[str, Training] = {}


def training(build: Callable[[Run], Parts], **settings: Any) -> Callable[[Any], Any]:
    """One more training, by its step."""

    def add(step: Callable[[Run, Parts, int], None]) -> Any:
        TRAININGS[step.__name__] = Training(build, step, **settings)
        return step

    return add


# ---- built ----


def _one(make: Callable[[Any], torch.optim.Optimizer] = adam) -> Callable[[Run], Parts]:
    def build(run: Run) -> Parts:
        model = Net()
        model, optimizer = run.prepare(model, make(model.parameters()))
        return Parts(model, (optimizer,))

    return build


def _by_epoch(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _scheduled(run: Run) -> Parts:
    model = Net()
    optimizer = adam(model.parameters())
    model, optimizer, schedule = run.prepare(model, optimizer, _by_epoch(optimizer))
    return Parts(model, (optimizer,), schedule)


def _two(run: Run) -> Parts:
    model = Net()
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() == 1]
    model, *optimizers = run.prepare(model, adam(wide), torch.optim.SGD(flat, lr=0.1, momentum=0.9))
    return Parts(model, tuple(optimizers))


class Kept(Averages):
    """Averages that are saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "how": self.how}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.how = state["shadow"], state["how"]


def _averaged(run: Run) -> Parts:
    parts = _one()(run)
    parts.kept = Kept(parts.model, "copy")
    return parts


def _frozen(run: Run) -> Parts:
    parts = _one()(run)
    parts.model.requires_grad_(False)
    return parts


# ---- steps ----


def _backward(run: Run, parts: Parts, number: int) -> None:
    loss = loss_of(parts.model, run.batch(number))
    run.backward(loss)
    run.see_mean(loss)


@training(_scheduled)
def clipped_and_scheduled(run: Run, parts: Parts, number: int) -> None:
    _backward(run, parts, number)
    run.clip(parts.model.parameters(), 0.5)
    parts.optimizers[0].step()
    parts.schedule.step()
    parts.optimizers[0].zero_grad()


@training(_one())
def evaluated(run: Run, parts: Parts, number: int) -> None:
    evaluate(run, parts.model)
    _backward(run, parts, number)
    evaluate(run, parts.model)
    run.step(*parts.optimizers)
    evaluate(run, parts.model)


@training(_one(), accumulation=2)
def in_windows(run: Run, parts: Parts, number: int) -> None:
    for micro in range(2):
        with run.accumulate(parts.model):
            _backward(run, parts, 2 * number + micro)
            run.step(*parts.optimizers)


@training(_two)
def two_optimizers(run: Run, parts: Parts, number: int) -> None:
    """The second steps every other time. Gradients are no part of a state: none are left over a step."""
    _backward(run, parts, number)
    run.step(*parts.optimizers[: 1 + number % 2])
    parts.model.zero_grad()


@training(_averaged)
def with_averages(run: Run, parts: Parts, number: int) -> None:
    _backward(run, parts, number)
    run.step(*parts.optimizers)
    parts.kept.update(parts.model)
    with parts.kept.swapped_in(parts.model):
        evaluate(run, parts.model)


@training(_one(ScheduleFree))
def schedule_free_to_eval_and_back(run: Run, parts: Parts, number: int) -> None:
    parts.optimizers[0].train()
    _backward(run, parts, number)
    run.step(*parts.optimizers)
    parts.optimizers[0].eval()
    evaluate(run, parts.model)


@training(_one(partial(Sam, how="copy")))
def sharpness_aware(run: Run, parts: Parts, number: int) -> None:
    """torch's state_dict() of it lacks the momentum of the optimizer inside."""
    (optimizer,) = parts.optimizers
    _backward(run, parts, number)
    optimizer.first_step()
    optimizer.zero_grad()
    _backward(run, parts, number)
    optimizer.second_step()
    optimizer.zero_grad()


@training(_frozen)
def unfrozen_in_phases(run: Run, parts: Parts, number: int) -> None:
    """What is trained is no part of the state: a script says it again, as here."""
    inner: Any = run.unwrap(parts.model)
    for chosen in (inner.head, inner.embed, inner)[: number + 1]:
        chosen.requires_grad_(True)
    _backward(run, parts, number)
    run.step(*parts.optimizers)


def _usual(run: Run, parts: Parts, number: int) -> None:
    _backward(run, parts, number)
    run.step(*parts.optimizers)


for _name, _make in OPTIMIZERS.items():
    TRAININGS[f"with_{_name}"] = Training(_one(_make), _usual)


# ---- runs ----

Seen = list[list[float]]


def straight(name: str) -> tuple[Seen, dict[str, Any]]:
    """What each step sees, and the last weights, in plain torch in one process."""
    one = TRAININGS[name]
    run = Run(accumulation=one.accumulation)
    torch.manual_seed(0)
    parts = one.build(run)
    seen = [_step(one, run, parts, number) for number in range(STEPS)]
    return seen, _weights(run)


def saved_everywhere(name: str, strategy: int, folder: Path) -> tuple[Seen, dict[str, Any]]:
    """The same on ranks, saved before every step (and once more, over itself), in folder/0, 1, ...: on every rank."""
    one = TRAININGS[name]
    run, parts = _begun(one, strategy, seed=0)
    seen = []
    for number in range(STEPS):
        for _ in range(2):
            run.accelerator.save_state(folder / str(number))
        seen.append(_step(one, run, parts, number))
    run.accelerator.save_state(folder / str(STEPS))
    found = seen, _weights(run)
    run.accelerator.free_memory()
    return found


def resumed(name: str, strategy: int, folder: Path, first: int) -> tuple[Seen, dict[str, Any]]:
    """New objects of other values, loaded from folder/first, do the steps from there on: on every rank."""
    one = TRAININGS[name]
    run, parts = _begun(one, strategy, seed=1 + first)
    run.accelerator.load_state(folder / str(first))
    seen = [_step(one, run, parts, number) for number in range(first, STEPS)]
    found = seen, _weights(run)
    run.accelerator.free_memory()
    return found


def resumed_everywhere(name: str, strategy: int, folder: Path) -> list[tuple[Seen, dict[str, Any]]]:
    """From every place: on every rank."""
    return [resumed(name, strategy, folder, first) for first in range(STEPS + 1)]


def _begun(one: Training, strategy: int, seed: int) -> tuple[RanksRun, Parts]:
    loop = Loop(lambda run: None, accumulation=one.accumulation, shardkit=one.shardkit)
    accelerator = Accelerator(config=config_of(strategy, loop))
    run = RanksRun(accelerator=accelerator, accumulation=one.accumulation)
    torch.manual_seed(seed)
    parts = one.build(run)
    if parts.kept is not None:
        accelerator.register_for_checkpointing(parts.kept)
    return run, parts


def _step(one: Training, run: Run, parts: Parts, number: int) -> list[float]:
    run.seen = []
    one.step(run, parts, number)
    return run.seen


def _weights(run: Run) -> dict[str, Any]:
    model: nn.Module
    (model,) = run.models
    return {fqn: whole(p).double().numpy().copy() for fqn, p in run.unwrap(model).named_parameters()}
