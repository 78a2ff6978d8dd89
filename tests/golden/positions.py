"""Positions in the data that a version saved in the middle of an epoch, and what it would have read from there."""

import json
import random
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from shardkit.data.preparing import prepare_loader
from tests.loaders import CPU, Chance, FlowWithState, Numbers, ShuffledFlow, prepared, run

NAME = "positions.json"


class RandomPairs(Sampler):
    """A batch sampler of batches of 1 to 3 that draws from Python's generator."""

    def __len__(self):
        return 20

    def __iter__(self):
        numbers, sizes = iter(random.sample(range(40), 40)), [1, 2, 3, 2] * 5
        return (list(islice(numbers, size)) for size in sizes)


class EvenFirst(DistributedSampler):
    """A rank-aware sampler with an order of its own: even numbers first, each half shuffled with (seed, epoch)."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = [2 * number + odd for odd in (0, 1) for number in torch.randperm(20, generator=generator).tolist()]
        return iter(order[self.rank :: self.num_replicas])


def batched(rank, world):
    return prepare_loader(DataLoader(Numbers(), batch_sampler=RandomPairs()), rank, world, CPU, 7)


def rank_aware(rank, world):
    sampler = EvenFirst(Numbers(), num_replicas=world, rank=rank)
    return prepare_loader(DataLoader(Numbers(), batch_size=4, sampler=sampler), rank, world, CPU, 7)


KINDS = {
    "shuffled": partial(prepared, shuffle=True),
    "in order": prepared,
    "part": partial(prepared, sampler=SubsetRandomSampler(range(39, -1, -1))),
    "weighted": partial(prepared, sampler=Weighted([1.0 + number for number in range(40)], 40)),
    "replaced": partial(prepared, sampler=RandomSampler(Numbers(), replacement=True)),
    "few": partial(prepared, sampler=RandomSampler(Numbers(100), num_samples=40)),
    "many": partial(prepared, sampler=RandomSampler(Numbers(30), num_samples=40)),
    "own sampler": partial(prepared, sampler=Chance()),
    "own batch sampler": batched,
    "own rank-aware sampler": rank_aware,
    "stream": partial(prepared, dataset=ShuffledFlow()),
    "stream with state": partial(prepared, dataset=FlowWithState()),
}


def save(folder: Path) -> None:
    """Writes, for every kind of loader, the position after 7 batches on 2 ranks, and the rest of that second epoch."""
    found = {}
    for kind, make in KINDS.items():
        whole, _ = run(2, epochs=2, make=make)
        before, state = run(2, epochs=2, stop=7 if kind != "own batch sampler" else 13, make=make)
        found[kind] = {"state": state, "rest": whole[len(before) :]}
    lines = [f"{json.dumps(kind)}: {json.dumps(values)}" for kind, values in found.items()]
    (folder / NAME).write_text("{\n" + ",\n".join(lines) + "\n}\n")
