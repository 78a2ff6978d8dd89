"""Ranks agree on where to stop, and notice that they differ, without a collective in any step."""

import gc
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shardkit.distributed import background_agreement
from shardkit.errors import ModelError
from tests.agreement import compared_often


def different(ranks: list[int]) -> ModelError:
    return ModelError(f"ranks {ranks}")


@compared_often()
def stopped_at(told: dict[int, int], seed: int, is_coupled: bool) -> int:
    """The boundary at which this rank stopped, -1 for none; `told`: rank -> boundary after which it gets a stop
    request.

    Ranks take their own time for each step. `is_coupled`: a collective in each step, as training has.
    """
    rank, flag = dist.get_rank(), []
    speed = random.Random(seed * 10 + rank)
    looking = background_agreement.BackgroundAgreement(lambda: bool(flag), different)
    try:
        for boundary in range(1, 200 if told else 30):
            time.sleep(speed.random() * 0.01)
            if is_coupled:
                dist.all_reduce(torch.zeros(1))
            if told.get(rank) == boundary:
                flag.append(1)
            if looking.pass_boundary():
                return boundary
        return -1
    finally:
        looking.close()


@pytest.mark.slow
@pytest.mark.fault_row(32)
@pytest.mark.parametrize("is_coupled", [True, False])
@pytest.mark.parametrize("told", [{1: 3}, {0: 5}, {0: 4, 1: 9, 2: 4}, {2: 1}])
def test_all_ranks_stop_at_the_same_boundary(ranks, told, is_coupled):
    for seed in range(2):
        found = ranks.run(3, stopped_at, told, seed, is_coupled)
        assert len(set(found)) == 1, found
        assert found[0] >= min(told.values())


def test_nobody_stops_where_nobody_was_told(ranks):
    assert ranks.run(2, stopped_at, {}, 0, True) == [-1, -1]


@compared_often()
def noticed(from_boundary: int) -> tuple[int, str]:
    """The boundary at which this rank raised, where rank 1's trace differs from some boundary on."""
    looking = background_agreement.BackgroundAgreement(lambda: False, different)
    try:
        for boundary in range(1, 400):
            time.sleep(0.002)
            dist.all_reduce(torch.zeros(1))
            trace = 7 * boundary + (dist.get_rank() == 1 and boundary >= from_boundary)
            looking.pass_boundary(trace)
    except ModelError as error:
        return boundary, str(error)
    finally:
        looking.close()
    return -1, ""


def test_a_trace_that_differs_is_noticed(ranks):
    one, other = ranks.run(2, noticed, 20)
    assert one == other
    assert one[0] >= 20 and one[1] == "ranks [1]"


@pytest.mark.slow
def test_equal_traces_are_never_noticed(ranks):
    assert ranks.run(2, noticed, 1000) == [(-1, ""), (-1, "")]


@compared_often()
def threads_left() -> set[int | None]:
    before = _watching()
    closed, dropped = (
        background_agreement.BackgroundAgreement(lambda: False, different),
        background_agreement.BackgroundAgreement(lambda: False, different),
    )
    closed.close()
    del dropped
    gc.collect()
    deadline = time.monotonic() + 5
    while _watching() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    return _watching() - before


def _watching() -> set[int | None]:
    return {thread.ident for thread in threading.enumerate() if thread.name == "shardkit-agreement"}


def test_no_thread_outlives_its_run(ranks):
    assert ranks.run(2, threads_left) == [set(), set()]


BUSY = """
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from shardkit.distributed import background_agreement

store = dist.TCPStore("127.0.0.1", 0, None, True)
dist.init_process_group("fake", store=store, rank=0, world_size=2)
background_agreement.POLL_S = 0
watch = background_agreement.BackgroundAgreement(lambda: False, ValueError)
"""


@pytest.mark.slow
def test_a_process_that_ends_without_close_is_not_aborted():
    """torch's store aborts a process whose interpreter ends while a thread is inside it."""
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_different_traces():
    here, there = (0, 7), (1, 7)
    reports = [(5, 0.1, here), (6, 0.1, here), None, (5, 0.2, here), (7, 0.1, here), (8, 0.1, there)]
    assert background_agreement._different([reports[0]] * 3, background_agreement._is_other_trace) == []
    assert background_agreement._different(reports, background_agreement._is_other_trace) == [1, 4]
    assert background_agreement._different(reports, background_agreement._is_other_rate) == [3]
    assert background_agreement._different(reports, background_agreement._is_other_place) == [5]
    assert background_agreement._different([None, reports[1]], background_agreement._is_other_trace) == []
