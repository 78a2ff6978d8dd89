"""One rank is told to stop: all ranks stop, at the same step, with a save."""

import signal

import pytest
import torch.distributed as dist

from shardkit import env
from shardkit.distributed import control, progress
from shardkit.distributed.digests import compare
from shardkit.errors import ConfigError, Preempted
from shardkit.launch import records
from shardkit.runtime import preemption


def stop_rank_1_at(step_told: int) -> tuple[int, list[int]]:
    """The step at which this rank stopped, and the steps that it saved."""
    saved: list[int] = []
    preemption.install()
    try:
        for step in range(10):
            if step == step_told and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGUSR1)
            preemption.stop_if_requested(lambda step=step: saved.append(step))
    except Preempted:
        return step, saved
    finally:
        preemption.uninstall()
    return -1, saved


@pytest.mark.fault_row(32)
def test_all_ranks_stop_at_the_step_in_which_one_was_told(ranks):
    assert ranks.run(2, stop_rank_1_at, 3) == [(3, [3]), (3, [3])]


def test_nobody_stops_where_nobody_was_told(ranks):
    assert ranks.run(2, stop_rank_1_at, 99) == [(-1, []), (-1, [])]


def test_one_process_needs_no_group_and_gets_its_handlers_back():
    before = signal.getsignal(signal.SIGTERM)
    preemption.install()
    preemption.install()
    try:
        assert not preemption.requested()
        signal.raise_signal(signal.SIGTERM)
        assert preemption.is_requested_here()
        assert preemption.requested()
    finally:
        preemption.uninstall()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not preemption.requested()


def test_a_rank_says_where_it_is(tmp_path, monkeypatch):
    for name, value in {
        "SHARDKIT_PROGRESS_DIR": str(tmp_path),
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    progress._writer.cache_clear()
    try:
        progress.post("backward", 7)
        place = records.read_places(tmp_path)[3]
        assert (place.local_rank, place.phase, place.step, place.is_watched) == (1, "backward", 7, True)
        progress.pause()
        assert not records.read_places(tmp_path)[3].is_watched
        progress.committed(6)
        assert records.read_places(tmp_path)[3].committed_step == 6
    finally:
        progress._writer.cache_clear()
        monkeypatch.undo()


def test_posting_without_a_launcher_does_nothing():
    progress._writer.cache_clear()
    progress.post("step", 1)
    progress.committed(1)
    progress.pause()
    progress._writer.cache_clear()


def compare_digests(digests: list[str]) -> str:
    everyone = control.start()
    env.update({"SHARDKIT_CONFIG_DIGEST": digests[dist.get_rank()]})  # the pool restores it
    try:
        compare(everyone)
    except ConfigError as problem:
        return str(problem)
    return ""


@pytest.mark.fault_row(37)
def test_ranks_of_different_configurations_all_refuse(ranks):
    assert ranks.run(2, compare_digests, ["same", "same"]) == ["", ""]
    one, other = ranks.run(2, compare_digests, ["this", "that"])
    assert one == other
    assert one.startswith("launch: the configuration of rank 1 differs")
