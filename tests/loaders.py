"""Data sets, samplers and prepared loaders for tests. A rank's part depends on its number alone, so most worlds are
made in one process."""

import random
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info

from shardkit.data.preparing import prepare_loader

CPU = torch.device("cpu")


class Numbers(Dataset):
    def __init__(self, length=40):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Flow(IterableDataset):
    """An iterable dataset in one fixed order."""

    def __init__(self, length=40):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class ShuffledFlow(Flow):
    """Draws its order from Python's global generator, as a shuffle buffer does."""

    def __iter__(self):
        return iter(random.sample(range(self.length), self.length))


class WorkerAwareFlow(Flow):
    """Splits itself over workers, as the torch documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, self.length, info.num_workers) if info else range(self.length))


class FlowWithState(Flow):
    """Tells and takes its own position; counts how many samples it was asked for."""

    position = 0
    reads = 0

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            self.reads += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def prepared(rank=0, world=1, dataset=None, batch_size=4, seed=7, split_batches=False, even_batches=True, **options):
    loader = DataLoader(Numbers() if dataset is None else deepcopy(dataset), batch_size=batch_size, **options)
    return prepare_loader(loader, rank, world, CPU, seed, split_batches=split_batches, even_batches=even_batches)


@dataclass
class Example:
    x: torch.Tensor


def lists(batches):
    return [batch.tolist() for batch in batches]


def flat(batches):
    return [int(index) for batch in batches for index in batch]


def run(world, start=None, epochs=1, stop=None, make=prepared, **options):
    """The global order that a world reads from a position on, and the position after it."""
    loaders = [make(rank, world, **options) for rank in range(world)]
    batches = []
    for loader in loaders:
        if start is not None:
            loader.load_state_dict(start)
        own = []
        for _ in range(epochs):
            for batch in loader:
                own.append(batch)
                if stop is not None and len(own) == stop:
                    break
            if stop is not None and len(own) == stop:
                break
        batches.append(own)
    assert len({len(own) for own in batches}) == 1, "ranks have different numbers of batches"
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return flat(batch for together in zip(*batches, strict=True) for batch in together), states[0]


class Backwards(Sampler):
    def __len__(self):
        return 40

    def __iter__(self):
        return iter(range(39, -1, -1))


class Chance(Backwards):
    """`drawn` samples by Python's generator, whatever its length says."""

    def __init__(self, drawn=40):
        self._drawn = drawn

    def __iter__(self):
        return iter(random.sample(range(40), self._drawn))


class Pairs(Sampler):
    """A batch sampler of batches of 1 to 3."""

    def __len__(self):
        return 20

    def __iter__(self):
        numbers, sizes = iter(range(40)), [1, 2, 3, 2] * 5
        return (list(islice(numbers, size)) for size in sizes)


def batch_sampled(rank, world, sampler=None, split_batches=False, dataset=None, even_batches=True, **options):
    loader = DataLoader(dataset or Numbers(), batch_sampler=sampler or Pairs(), **options)
    return prepare_loader(loader, rank, world, CPU, 7, split_batches=split_batches, even_batches=even_batches)


class Reversed(DistributedSampler):
    """A rank-aware sampler with a custom order."""

    def __iter__(self):
        return iter(range(39 - self.rank, -1, -self.num_replicas))


class Fixed(DistributedSampler):
    """A rank-aware sampler that made up its mind when it was made."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.fixed = list(super().__iter__())

    def __iter__(self):
        return iter(self.fixed)


def distributed(rank, world, kind=DistributedSampler, **options):
    sampler = kind(Numbers(), num_replicas=world, rank=rank, **options)
    return prepare_loader(DataLoader(Numbers(), batch_size=4, sampler=sampler), rank, world, CPU, 7)


def moved(loader, state):
    loader.load_state_dict(state)
    return loader


def read_inside(make, inner):
    """Loops of `inner` batches inside a loop, after its batches 3 and 5. They, it, and a run that goes on from each of
    its places read what loops alone read, and so does the next epoch."""

    def lists(loader):
        return [batch.tolist() for batch in loader]

    alone, following = lists(loader := make()), lists(loader)
    loader, outer = make(), []
    for batch in loader:
        outer.append(batch.tolist())
        loader.note_step()
        if len(outer) in (3, 5):
            inside = lists(islice(loader, inner))
            assert inside == following[:inner] or len(outer) == 5
        assert lists(moved(make(), loader.state_dict())) == alone[len(outer) :]
    assert outer == alone
    assert sorted(flat(loader)) == sorted(flat(map(torch.tensor, alone)))
