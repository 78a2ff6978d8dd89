"""Trainings that look at their data, evaluate and save at random places, are cut at random places, and go on from the
newest save in new objects: each trains on what the same training reads without any of this."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

from shardkit import Accelerator
from tests.loaders import Chance, Flow, FlowWithState, Numbers, ShuffledFlow

EPOCHS = 3
CUTS = 2
Step = list[list[list[int]]]
"""The samples of this rank: of each loader, of each micro-batch."""


class NewestLoop(Flow):
    """Has the state of the loop that was the last to begin; every loop begins anew, unless a state was loaded. (As
    streams of Hugging Face.)"""

    begin, state = 0, [0]

    def __iter__(self) -> Iterator[int]:
        (begin, self.begin), self.state = (self.begin, 0), [self.begin]
        for number in range(begin, self.length):
            self.state[0] += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.state[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin, self.state = state["begin"], [state["begin"]]


# ---- loaders ----


def _of(*data: Any, **options: Any) -> Callable[[], list[DataLoader]]:
    return lambda: [DataLoader(one(), batch_size=2, **options) for one in data]


def _numbers(length: int) -> Callable[[], Numbers]:
    return lambda: Numbers(length)


def _weighted() -> list[DataLoader]:
    sampler = WeightedRandomSampler([1.0 + number % 3 for number in range(11)], 11)
    return [DataLoader(Numbers(11), batch_size=2, sampler=sampler)]


def _by_chance() -> list[DataLoader]:
    return [DataLoader(Numbers(40), batch_size=2, sampler=Chance(11))]


# ---- scripts: what each step is given, and None between two loops ----

Batches = list[torch.Tensor]


def _alone(loader: Any) -> Iterator[Batches | None]:
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            yield [batch]
        yield None


def _zipped(first: Any, second: Any) -> Iterator[Batches | None]:
    for _ in range((first if len(first) <= len(second) else second).epoch, EPOCHS):
        for pair in zip(first, second, strict=False):
            yield list(pair)
        yield None


def _in_turn(first: Any, second: Any) -> Iterator[Batches | None]:
    for epoch in range(min(first.epoch, second.epoch), EPOCHS):
        for loader in (first, second):
            if loader.epoch == epoch:
                for batch in loader:
                    yield [batch]
                yield None


@dataclass(frozen=True)
class Kind:
    loaders: Callable[[], list[DataLoader]]
    script: Callable[..., Iterator[Batches | None]] = _alone


KINDS = {
    "shuffled": Kind(_of(_numbers(11), shuffle=True)),
    "weighted": Kind(_weighted),
    "custom sampler": Kind(_by_chance),
    "stream": Kind(_of(lambda: ShuffledFlow(11))),
    "stream with state": Kind(_of(lambda: FlowWithState(11))),
    "state of the newest loop": Kind(_of(lambda: NewestLoop(11))),
    "zip, the first is shorter": Kind(_of(_numbers(7), _numbers(11), shuffle=True), _zipped),
    "zip, the second is shorter": Kind(_of(_numbers(11), _numbers(7), shuffle=True), _zipped),
    "in turn": Kind(_of(_numbers(7), _numbers(9), shuffle=True), _in_turn),
}


# ---- runs ----


class Cut(Exception):
    """The run ends here."""


@dataclass
class Chances:
    """What happens beside the training, at random, the same on every rank: nothing without a generator."""

    draws: random.Random | None = None
    folder: Path = Path()
    ticks_to_cut: float = float("inf")
    newest: int | None = None
    """Steps that were done at the newest save."""
    log: list[str] = field(default_factory=list)

    def tick(self, accelerator: Accelerator, loaders: list[Any], steps: int, place: str) -> None:
        """Maybe looks, evaluates, saves or ends the run. (Before the first step nobody knows what is trained on.)"""
        if self.draws is None or not steps:
            return
        kinds = ("look", "save") if place == "loaded" else ("look", "save", "save", "short", "whole", "save inside")
        for _ in range(self.draws.choice((0, 0, 1, 2))):
            what = self.draws.choice(kinds)
            trained = [number for number, one in enumerate(loaders) if one.state_dict()["purpose"] == "training"]
            number = self.draws.choice(trained)
            self.log.append(f"{place} after step {steps}: {what} {number}")
            if what == "look" and place == "loaded" and len(loaders) > 1:
                continue  # where the restored epoch is over, it would take the place of the loop that ends both
            if what == "save":
                self._save(accelerator, steps)
            else:
                batches = {"look": 1, "short": 2, "save inside": 2}.get(what)
                for batch, _ in enumerate(islice(loaders[number], batches)):
                    if what == "save inside" and batch == 0:
                        self._save(accelerator, steps)
        self.ticks_to_cut -= 1
        if self.ticks_to_cut < 0 and self.newest is not None:
            self.log.append(f"{place} after step {steps}: cut")
            raise Cut

    def _save(self, accelerator: Accelerator, steps: int) -> None:
        accelerator.save_state(self.folder)
        self.newest = steps


def train(kind: Kind, window: int, chances: Chances, steps: list[Step]) -> list[float]:
    """Goes on after these steps, and adds to them; the last weights."""
    accelerator = Accelerator(
        gradient_accumulation_steps=window,
        config={"use_cpu": True, "distributed_type": "MULTI_CPU", "shardkit": {"seed": 3}},
    )
    torch.manual_seed(len(steps))
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0 + len(steps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *kind.loaders())
    try:
        if steps:
            accelerator.load_state(chances.folder)
            chances.tick(accelerator, loaders, len(steps), "loaded")
        micro_batches: Step = []
        for batches in kind.script(*loaders):
            if batches is None:
                chances.tick(accelerator, loaders, len(steps), "between")
                continue
            micro_batches.append([batch.tolist() for batch in batches])
            with accelerator.accumulate(model):
                loss = sum(((model(batch[:, None] / 10.0) - 1) ** 2).mean() for batch in batches)
                chances.tick(accelerator, loaders, len(steps), "before backward")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                steps.append(micro_batches)
                micro_batches = []
            chances.tick(accelerator, loaders, len(steps), "after")
        return [parameter.item() for parameter in model.parameters()]
    finally:
        accelerator.free_memory()


def interrupted(name: str, seed: int, folder: Path) -> str | None:
    """What differs from the training without interruption; None where nothing does."""
    kind, draws = KINDS[name], random.Random(seed)
    window = draws.randint(1, 3)
    expected: list[Step] = []
    weights = train(kind, window, Chances(), expected)
    chances, steps = Chances(draws, folder / f"{name} {seed}"), []
    for _ in range(CUTS):
        chances.ticks_to_cut = draws.randint(0, 2 * len(expected))
        try:
            found = train(kind, window, chances, steps)
            break
        except Cut:
            del steps[chances.newest :]
    else:
        chances.ticks_to_cut = float("inf")
        found = train(kind, window, chances, steps)
    if steps == expected and torch.allclose(torch.tensor(found), torch.tensor(weights)):
        return None
    return "\n".join([f"{name}, seed {seed}, window {window}:", *chances.log, f"got {steps}", f"expected {expected}"])


def all_interrupted(name: str, seeds: range, folder: Path) -> list[str]:
    """The first differences of these seeds: on every rank."""
    return [found for seed in seeds if (found := interrupted(name, seed, folder)) is not None]
