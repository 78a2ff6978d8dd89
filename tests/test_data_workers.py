"""Loaders with workers: the order, what is drawn at random, loops that are left, and the end of the workers."""

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    get_worker_info,
)

from shardkit import Accelerator
from shardkit.data.skipping import skip_first_batches
from tests.loaders import (
    Flow,
    FlowWithState,
    Numbers,
    ShuffledFlow,
    flat,
    lists,
    moved,
    prepared,
)


class Slow(Numbers):
    """The first worker is slower than the second."""

    def __getitem__(self, index):
        if get_worker_info().id == 0:
            time.sleep(0.05)
        return super().__getitem__(index)


@pytest.mark.slow
def test_batches_come_in_order_whatever_worker_is_first(capsys):
    loader = prepared(dataset=Slow(24), num_workers=2, in_order=False)
    assert flat(loader) == list(range(24))
    assert "data: in_order=False is ignored" in capsys.readouterr().err


def noisy(numbers):
    """Draws while it collates, as masking does."""
    return [(int(number), int(torch.randint(10**6, ())), random.random()) for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow, FlowWithState])
def test_what_collating_draws_in_workers_goes_on_after_a_resume_and_differs_between_ranks(kind, persistent):
    def loader(rank=0):
        return prepared(rank, 2, kind(40), num_workers=2, persistent_workers=persistent, collate_fn=noisy)

    whole = [*(one := loader()), *one]
    for stop in (1, 2, 5, 6):
        one, given = loader(), []
        while len(given) < stop:
            given += islice(one, stop - len(given))
        assert given == whole[:stop]
        resumed = moved(loader(), one.state_dict())
        assert [*resumed, *resumed][: len(whole) - stop] == whole[stop:]
    drawn, others = ({draw for batch in loader(rank) for _, draw, _ in batch} for rank in range(2))
    assert not drawn & others


class HalfFlow(Flow):
    """A stream that gives a rank its part."""

    split_by_rank = (0, 2)


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("kind", [Numbers, Flow, FlowWithState, HalfFlow])
def test_without_workers_collating_draws_between_the_draws_of_the_loop_as_in_plain_torch(kind, batch_size):
    """No batch is collated ahead: a masking collate_fn would draw others after a resume, and so would the model."""
    world = 2 if kind is HalfFlow else 1
    collate = noisy if batch_size else (lambda number: noisy([number]))

    def drawn(batches):
        return [(batch, float(torch.rand(()))) for batch in batches]

    random.seed(0)
    torch.manual_seed(0)
    plain = DataLoader(kind(20), batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
    expected = drawn(plain)
    random.seed(0)
    torch.manual_seed(0)
    loader = prepared(0, world, kind(20), batch_size=batch_size, collate_fn=collate)
    assert drawn(loader) == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_ready_batches_in_workers_draw_otherwise_on_every_rank(persistent):
    def drawn(rank):
        options = {"batch_size": None, "num_workers": 1, "persistent_workers": persistent}
        return {float(value) for value in prepared(rank, 2, Noise(8), **options)}

    assert drawn(0) == drawn(0)
    assert not drawn(0) & drawn(1)


class Noise(Numbers):
    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow, FlowWithState])
def test_loops_that_are_left_begin_anew_with_workers_that_persist(kind):
    shuffle = {"shuffle": True} if kind is Numbers else {}
    plain = prepared(dataset=kind(40), num_workers=2, **shuffle)
    loader = prepared(dataset=kind(40), num_workers=2, persistent_workers=True, prefetch_factor=4, **shuffle)
    for stop in (1, 10, 3, 10):
        assert lists(islice(loader, stop)) == lists(islice(plain, stop))
    skip_first_batches(loader, 6)
    skip_first_batches(plain, 6)
    assert lists(loader) == lists(plain)
    assert len(lists(loader)) == 10


CYCLE = """
import gc, multiprocessing
from tests.loaders import FlowWithState, prepared

if __name__ == "__main__":
    loader = prepared(dataset=FlowWithState(40), num_workers=1, persistent_workers=True)
    next(iter(loader))
    loader.loader = loader  # as a traceback that is kept refers to it
    del loader
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(60)  # a worker that does not answer for 5 s is killed, and torch does not wait for that
    print(len(multiprocessing.active_children()))
"""


@pytest.mark.slow
def test_workers_of_a_loader_in_a_cycle_end_and_let_the_process_end(tmp_path):
    """They ignore the signal with which torch ends those that do not answer, and Python's exit waits for them."""
    (tmp_path / "script.py").write_text(CYCLE)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


@pytest.mark.slow
def test_workers_of_a_loader_that_is_freed_end_at_once():
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
    others = multiprocessing.active_children()
    loader = accelerator.prepare(DataLoader(Numbers(), num_workers=1, persistent_workers=True))
    assert len(list(loader)) == 40
    (worker,) = [one for one in multiprocessing.active_children() if one not in others]
    gc.disable()
    try:
        accelerator._run.loaders.clear()
        del loader
        assert not worker.is_alive()
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow])
def test_loops_inside_a_loop_with_workers_that_persist(kind):
    """torch's persistent workers serve one loop: a second one takes them from the first."""
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}
    epochs = [lists(alone := prepared(dataset=kind(20), num_workers=1)), *(lists(alone) for _ in range(2))]
    loader, outer, inner = prepared(dataset=kind(20), **options), [], []
    for number, batch in enumerate(loader):
        outer.append(batch.tolist())
        if number == 1:
            looked = next(iter(loader)).tolist()
        elif number in (2, 4):
            inner.append(lists(loader))
    assert (outer, looked, *inner) == (epochs[0], epochs[1][0], epochs[2], lists(alone))
    assert lists(loader) == epochs[1]
    pairs = zip(loader, loader, strict=True)
    assert [(one.tolist(), other.tolist()) for one, other in pairs] == list(zip(epochs[2], inner[1], strict=True)), (
        "after epoch 1 come 2 and 3"
    )
    kept = iter(loader)
    next(kept)
    assert len(lists(loader)) == len(lists(kept)) + 1 == 5
