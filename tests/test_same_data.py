"""A loader that was not prepared, or its name from before, gives every rank the same samples: this is said. Loaders
that read different data on each rank would lose samples: an error."""

import logging
import os
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, SubsetRandomSampler, TensorDataset

from shardkit import Accelerator
from shardkit.data.first_items import are_different, fields_of
from shardkit.errors import UsageError
from tests import loops
from tests.loaders import Flow, Numbers
from tests.loops.net import Net, adam, loss_of
from tests.loops.run import WORDS
from tests.ranks import log_lines

OLD_NAMES = ("the old name", "all the old names")


def trained(strategy: int, how: str) -> list[str]:
    """The warnings of this rank, in a few steps with batches of this kind."""
    with log_lines(level=logging.WARNING) as lines:
        accelerator = Accelerator(config=loops.config_of(strategy, loops.LOOPS["usual"]))
        tokens = torch.randint(0, WORDS, (16, 6), generator=torch.Generator().manual_seed(0))
        loader: Any = DataLoader(TensorDataset(tokens), batch_size=4)
        model = Net()
        if how == "a head of zeros":
            torch.nn.init.zeros_(model.head.weight)
            torch.nn.init.zeros_(model.head.bias)
        model, optimizer, prepared = accelerator.prepare(model, own := adam(model.parameters()), loader)
        if how == "all the old names":
            optimizer = own
        batches = prepared if how == "prepared" else loader
        for (batch,) in [*batches, *batches]:
            mine = batch if how in ("prepared", *OLD_NAMES) else batch.chunk(2)[accelerator.process_index]
            accelerator.backward(loss_of(model, mine))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.free_memory()
    return lines


def of_all() -> dict[tuple[int, str], list[str]]:
    kinds = (*OLD_NAMES, "prepared", "by hand", "a head of zeros")
    return {(strategy, how): trained(strategy, how) for strategy in (1, 3) for how in kinds}


@pytest.mark.slow
def test_the_same_samples_on_all_ranks_are_noticed(ranks):
    for rank, found in enumerate(ranks.run(2, of_all)):
        for (strategy, how), told in found.items():
            if how in OLD_NAMES and rank == 0:
                (text,) = told
                assert text.startswith("data: all ranks had the same losses in the first 3 steps"), strategy
                assert "give the DataLoader to accelerator.prepare and read what it returns" in text
            else:
                assert told == [], (strategy, how)


class OwnRandom(Sampler):
    """Shuffles with a generator of its own."""

    def __init__(self, seed=None):
        self.random = random.Random(seed)

    def __len__(self):
        return 40

    def __iter__(self):
        return iter(self.random.sample(range(40), 40))


class OwnRandomBatches(OwnRandom):
    def __iter__(self):
        numbers = self.random.sample(range(40), 40)
        return iter([numbers[begin : begin + 4] for begin in range(0, 40, 4)])


class OwnPart(IterableDataset):
    """Yields its rank's part, as the streams of some libraries do; and the same text on all ranks."""

    def __iter__(self):
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return ((number, object()) for number in range(rank, 40, world))


class LooksDifferent(Flow):
    def __iter__(self):
        return ((number, f"/scratch/{os.getpid()}/{number}") for number in super().__iter__())


def declared(dataset, split):
    dataset.split_by_rank = split
    return dataset


def numbers_of(items):
    return torch.tensor([float(item[0] if isinstance(item, tuple) else item) for item in items])


STREAMS_AND_ORDERS = {
    "a sampler of its own": lambda: DataLoader(Numbers(), batch_size=4, sampler=OwnRandom()),
    "a batch sampler of its own": lambda: DataLoader(Numbers(), batch_sampler=OwnRandomBatches()),
    "a subset of its own": lambda: DataLoader(
        Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(int(os.environ["RANK"]), 40, 2))
    ),
    "a stream by RANK": lambda: DataLoader(OwnPart(), batch_size=4, collate_fn=numbers_of),
    "a loop of its own": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "a look at one batch": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "a look inside the loop": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "a seeded sampler": lambda: DataLoader(Numbers(), batch_size=4, sampler=OwnRandom(5)),
    "a whole stream": lambda: DataLoader(LooksDifferent(), batch_size=4, collate_fn=numbers_of),
    "a stream by RANK, declared": lambda: DataLoader(
        declared(OwnPart(), (int(os.environ["RANK"]), 2)), batch_size=4, collate_fn=numbers_of
    ),
    "a stream by RANK, declared whole": lambda: DataLoader(
        declared(OwnPart(), False), batch_size=4, collate_fn=numbers_of
    ),
}


def first_steps(name: str) -> str:
    """The error of this rank in two steps; empty where there is none."""
    accelerator = Accelerator(config={"use_cpu": True})
    model = nn.Linear(1, 1)
    parts = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), STREAMS_AND_ORDERS[name]())
    model, optimizer, loader = parts
    if name in ("a loop of its own", "a look at one batch") and accelerator.is_main_process:
        for _ in zip(range(2 if "loop" in name else 1), loader, strict=False):
            pass
    try:
        for _, batch in zip(range(2), loader, strict=False):
            if name == "a look inside the loop" and accelerator.is_main_process:
                next(iter(loader))
            accelerator.backward(model(batch.float().reshape(-1, 1)).mean())
            optimizer.step()
    except UsageError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return ""


@pytest.mark.parametrize("name", STREAMS_AND_ORDERS)
def test_items_that_differ_between_ranks_are_an_error_before_the_first_step(ranks, name):
    texts = ranks.run(2, first_steps, name)
    assert texts[0] == texts[1]
    if name.endswith("its own") or name.endswith("by RANK"):
        assert texts[0].startswith("data: the dataset or sampler of prepared loader 1 yields different items on each")
    else:
        assert texts[0] == ""


def first_gathers(name: str, method: str) -> str:
    """The error of this rank in an evaluation without steps; empty where there is none."""
    accelerator = Accelerator(config={"use_cpu": True})
    loader = accelerator.prepare(STREAMS_AND_ORDERS[name]())
    try:
        for batch in loader:
            getattr(accelerator, method)(batch)
    except UsageError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return ""


@pytest.mark.parametrize("name", ["a stream by RANK", "a whole stream", "a stream by RANK, declared"])
def test_items_that_differ_between_ranks_are_an_error_in_an_evaluation_alone(ranks, name):
    for method in ("gather", "gather_for_metrics"):
        texts = ranks.run(2, first_gathers, name, method)
        is_wrong = name == "a stream by RANK"
        assert [text.startswith("data: the dataset or sampler of prepared") for text in texts] == [is_wrong] * 2, texts


def evaluated_later(name: str, method: str) -> str:
    """The error of this rank in an evaluation between epochs that have gathered their losses; or the samples."""
    accelerator = Accelerator(config={"use_cpu": True})
    model = nn.Linear(1, 1)
    parts = [model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(Numbers(), batch_size=4)]
    model, optimizer, loader, other = accelerator.prepare(*parts, STREAMS_AND_ORDERS[name]())
    seen = 0
    try:
        for _ in range(2):
            for batch in loader:
                loss = model(batch.float().reshape(-1, 1)).mean()
                accelerator.backward(loss)
                optimizer.step()
                accelerator.gather(loss)
            own = list(other)
            if method == "reduce":
                seen += int(accelerator.reduce(torch.tensor(sum(map(len, own)))))
            elif method == "objects":
                seen += len(accelerator.gather_for_metrics([str(number) for batch in own for number in batch]))
            else:
                seen += len(accelerator.gather(torch.cat(own)))
    except UsageError as error:
        return str(error)
    finally:
        accelerator.free_memory()
    return str(seen)


@pytest.mark.parametrize("name", ["a stream by RANK", "a sampler of its own", "a whole stream", "a loop of its own"])
@pytest.mark.parametrize("method", ["gather", "reduce", "objects"])
def test_items_that_differ_are_an_error_in_every_loop_whose_values_meet(ranks, name, method):
    texts = ranks.run(2, evaluated_later, name, method)
    if name in ("a stream by RANK", "a sampler of its own"):
        assert texts[0] == texts[1]
        assert texts[0].startswith("data: the dataset or sampler of prepared loader 2 yields different items on each")
    else:
        assert texts == ["80", "80"]


def test_items_are_different_only_if_no_field_is_the_same():
    one = fields_of([(number, f"/a/{number}", object()) for number in range(20)])
    same = fields_of([(number, f"/b/{number}", object()) for number in range(20)])
    other = fields_of([(number + 1, f"/b/{number}", object()) for number in range(20)])
    assert are_different([one, other]) and are_different([one, same, other])
    assert not are_different([one, same]) and not are_different([same, other])
    assert not are_different([fields_of([object()]), fields_of([object()])]) and not are_different([[], []])
    assert are_different([fields_of([torch.zeros(2)]), fields_of([torch.ones(2)])])
