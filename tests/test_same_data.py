"""A loader that was not prepared, or its name from before, gives every rank the same samples: this is said."""

import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator
from tests import loops
from tests.loops.net import Net, adam, loss_of
from tests.loops.run import WORDS


def trained(strategy: int, how: str) -> list[str]:
    """The warnings of this rank, in a few steps with batches of this kind."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardkit").addHandler(handler)
    accelerator = Accelerator(config=loops.config_of(strategy, loops.LOOPS["usual"]))
    tokens = torch.randint(0, WORDS, (16, 6), generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader(TensorDataset(tokens), batch_size=4)
    model = Net()
    if how == "a head of zeros":
        torch.nn.init.zeros_(model.head.weight)
        torch.nn.init.zeros_(model.head.bias)
    model, optimizer, prepared = accelerator.prepare(model, adam(model.parameters()), loader)
    batches = prepared if how == "prepared" else loader
    for (batch,) in [*batches, *batches]:
        mine = batch if how in ("prepared", "the old name") else batch.chunk(2)[accelerator.process_index]
        accelerator.backward(loss_of(model, mine))
        optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("shardkit").removeHandler(handler)
    accelerator.free_memory()
    return told


def of_all() -> dict[tuple[int, str], list[str]]:
    kinds = ("the old name", "prepared", "by hand", "a head of zeros")
    return {(strategy, how): trained(strategy, how) for strategy in (1, 3) for how in kinds}


@pytest.mark.slow
def test_the_same_samples_on_all_ranks_are_noticed(ranks):
    for rank, found in enumerate(ranks.run(2, of_all)):
        for (strategy, how), told in found.items():
            if how == "the old name" and rank == 0:
                (text,) = told
                assert text.startswith("data: all ranks had the same losses in the first 3 steps"), strategy
                assert "give the DataLoader to accelerator.prepare and read what it returns" in text
            else:
                assert told == [], (strategy, how)
