"""Calls that only some ranks make. A waiting rank reports early for which ones, and the user's own
error is kept."""

import logging
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from shardkit import Accelerator
from shardkit.checkpoint.files import manifest
from shardkit.distributed import named_barrier, rank_store
from shardkit.errors import CheckpointError, CheckpointSaveError, UsageError
from shardkit.runtime.checkpoints import loading, saving
from tests import forked
from tests.numbered_runs import run_of, train


@contextmanager
def hasty(lines=None, times=0.1):
    """Shorter waiting times; log messages go into `lines`."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    found = named_barrier.PATIENCE_S, named_barrier.WARN_AFTER_S, named_barrier.IN_EXCEPT_S
    named_barrier.PATIENCE_S, named_barrier.WARN_AFTER_S, named_barrier.IN_EXCEPT_S = (value * times for value in found)
    if lines is not None:
        logging.getLogger("shardkit.distributed.named_barrier").addHandler(handler)
    try:
        yield
    finally:
        named_barrier.PATIENCE_S, named_barrier.WARN_AFTER_S, named_barrier.IN_EXCEPT_S = found
        logging.getLogger("shardkit.distributed.named_barrier").removeHandler(handler)


CALLS = {
    "save_state": (CheckpointSaveError, lambda run, folder: run[0].save_state(folder / "one")),
    "save_model": (CheckpointSaveError, lambda run, folder: run[0].save_model(run[1], folder / "export")),
    "load_state": (CheckpointError, lambda run, folder: run[0].load_state(folder / "there")),
    "resume": (CheckpointError, lambda run, folder: loading.load_newest(run[0]._run, "resume")),
}


def on_rank_0_only(project, call):
    """What rank 0 logs and raises; then all ranks make the call, and it works."""
    run = run_of(project / "run", checkpoint={"timeout_s": 2})
    train(run, 1)
    run[0].save_state(project / "there")
    run[0].save_state()
    error, act = CALLS[call]
    lines, told = [], ""
    with hasty(lines):
        if run[0].is_main_process:
            with pytest.raises(error) as caught:
                act(run, project)
            told = str(caught.value)
        run[0].wait_for_everyone()
        act(run, project)
    saving.close(run[0]._run)
    return lines, told


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.slow
def test_who_waits_says_for_whom_and_can_come_again(ranks, tmp_path, call):
    (lines, told), others = ranks.run(2, on_rank_0_only, tmp_path, call)
    assert others == ([], "")
    assert lines == [
        f"{call}: rank 0 waits for the others, 2 s at most: rank 1 has not come; every rank must call it, in the same "
        "order as the others, outside of `if accelerator.is_main_process`."
    ]
    assert told.startswith(f"{call}: rank 1 has not come after 2 s; every rank must call it")


def come_late(project):
    run, lines = run_of(project), []
    with hasty(lines):
        if dist.get_rank() == 1:
            time.sleep(2.5)
        path = run[0].save_state()
    saving.close(run[0]._run)
    return lines, manifest.read(path).step


@pytest.mark.slow
def test_a_rank_that_comes_late_is_waited_for_with_one_warning(ranks, tmp_path):
    first, second, third = ranks.run(3, come_late, tmp_path)
    assert len(first[0]) == 1 and "600 s at most: rank 1 has not come" in first[0][0]
    assert second[0] == third[0] == [], "one rank speaks for all that wait"


def in_different_calls(project):
    run = run_of(project, checkpoint={"timeout_s": 3})
    path, lines = run[0].save_state(), []
    run[0].wait_for_everyone()
    with (
        hasty(lines, times=0.03),
        pytest.raises(CheckpointError, match=r"has not come \(rank . (waits in|has given up)"),
    ):
        run[0].save_state() if dist.get_rank() == 0 else run[0].load_state(path)
    run[0].wait_for_everyone()  # else one's next load could meet the other's first
    run[0].load_state(path)
    saving.close(run[0]._run)
    return lines


@pytest.mark.slow
def test_ranks_in_different_calls_are_named_with_them(ranks, tmp_path):
    first, second = ranks.run(2, in_different_calls, tmp_path)
    assert "save_state: rank 0 waits" in first[0] and "rank 1 has not come (rank 1 waits in load_state)" in first[0]
    assert "load_state: rank 1 waits" in second[0] and "rank 0 has not come (rank 0 waits in save_state)" in second[0]


def reduced_on_rank_0_only(call):
    """What rank 0 is told of a collective after a step of all; then all make it."""
    accelerator = Accelerator(
        config={"distributed_type": "MULTI_CPU", "shardkit": {"launch": {"process_group_timeout_s": 3.0}}}
    )
    told, value = "", torch.ones(2)
    with hasty([]):
        if accelerator.is_main_process:
            with pytest.raises(UsageError) as caught:
                getattr(accelerator, call)(value)
            told = str(caught.value)
        accelerator.wait_for_everyone()
    return told, getattr(accelerator, call)(value).sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("call", ["reduce", "gather", "gather_for_metrics", "broadcast", "pad_across_processes"])
def test_a_collective_of_rank_0_only_is_told(ranks, call):
    (told, first), (_, second) = ranks.run(2, reduced_on_rank_0_only, call)
    assert told.startswith(f"{call}: rank 1 has not come after 3 s; every rank must call it"), told
    assert first == second == (2.0 if call in ("broadcast", "pad_across_processes") else 4.0)


def save_in_an_except(project, who):
    run, lines, told, seconds, is_kept = run_of(project), [], None, 0.0, True
    with hasty(lines):
        try:
            if dist.get_rank() in who:
                raise ValueError("bad sample at index 1234")
        except ValueError as own:
            began = time.monotonic()
            if len(who) == dist.get_world_size():
                run[0].save_state(project / "emergency")
            else:
                with pytest.raises(CheckpointSaveError) as caught:
                    run[0].save_state(project / "emergency")
                told, seconds = str(caught.value), time.monotonic() - began
                is_kept = caught.value.__cause__ is own
    run[0].wait_for_everyone()
    saving.close(run[0]._run)
    return lines, told, seconds, is_kept


@pytest.mark.slow
def test_a_save_in_one_ranks_except_keeps_the_users_error(ranks, tmp_path):
    (lines, told, seconds, is_kept), others = ranks.run(2, save_in_an_except, tmp_path, (0,))
    assert others[:2] == ([], None)
    assert 'ValueError("bad sample at index 1234")' in lines[0] or "ValueError: bad sample at index 1234" in lines[0]
    assert "called while this was handled" in lines[0] and "test_named_barrier.py" in lines[0], "logged before it waits"
    assert "rank 1 has not come after 3 s" in told
    assert "called while handling ValueError: bad sample at index 1234" in told
    assert is_kept and seconds < 20, "not the 600 s of checkpoint.timeout_s"


def test_a_save_in_the_except_of_all_ranks_is_a_save(ranks, tmp_path):
    assert [told[:2] for told in ranks.run(2, save_in_an_except, tmp_path, (0, 1))] == [([], None)] * 2
    assert manifest.read(tmp_path / "emergency").world_size == 2


def go_on_without_rank_0(project):
    """Rank 0 saves alone, as in `if accelerator.is_main_process`; the others train on, into their next collective."""
    run = run_of(project, checkpoint={"timeout_s": 2})
    train(run, 1)
    if run[0].is_main_process:
        with hasty():
            run[0].save_state()
    train(run, 1)


@pytest.mark.slow
def test_the_error_is_that_of_the_save_and_not_of_another_line(tmp_path):
    first, second = forked.run(2, go_on_without_rank_0, tmp_path)
    assert "CheckpointSaveError: save_state: rank 1 has not come after 2 s" in first.error
    assert second.error is None or "save_state" not in second.error


def several_meetings():
    began = time.monotonic()
    for number in range(20):
        named_barrier.meet("save_state" if number % 3 else "load_state", 60.0, CheckpointError)
        assert torch.tensor(1).item() == 1
    return time.monotonic() - began < 30


def test_meetings_follow_one_another(ranks):
    assert ranks.run(3, several_meetings) == [True] * 3


def test_one_process_meets_nobody():
    named_barrier.meet("save_state", 0.0, CheckpointError)


def wait_for_a_rank_that_has_begun_anew():
    store = dist.HashStore()
    store.set("over/one", "1")
    rank_store._start[:] = [(store, "one")]
    try:
        if dist.get_rank() == 0:
            named_barrier.meet("gather", 30.0, UsageError)
    except UsageError as error:
        return str(error)
    finally:
        rank_store._start.clear()


@pytest.mark.slow
def test_who_waits_for_a_rank_that_torchrun_has_started_again_ends_soon(ranks):
    told = ranks.run(2, wait_for_a_rank_that_has_begun_anew)[0]
    assert told.startswith("gather: rank 1 has ended, and was started again; this rank ends, too"), told
