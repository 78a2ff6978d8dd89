"""Signals are remembered, ranks say where they are, and different configurations are refused."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardkit import env
from shardkit.config.schema import Config
from shardkit.distributed import background_agreement, control, progress
from shardkit.distributed.same_config import compare
from shardkit.errors import ConfigError, ModelError
from shardkit.launch import rank_files
from shardkit.launch.forking import fork
from shardkit.runtime.steps import preemption


def different(ranks: list[int]) -> ModelError:
    return ModelError(f"ranks {ranks}")


@pytest.mark.fault_row(32)
def test_a_signal_is_remembered_and_the_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    preemption.install()
    preemption.install()
    try:
        assert not preemption.is_requested_here()
        signal.raise_signal(signal.SIGTERM)
        assert preemption.is_requested_here()
        assert background_agreement.BackgroundAgreement(preemption.is_requested_here, different).pass_boundary(), (
            "one process asks nobody"
        )
    finally:
        preemption.uninstall()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not preemption.is_requested_here()


def test_a_process_that_the_script_forks_ends_by_sigterm():
    """As the workers of a multiprocessing.Pool do when it is closed."""
    preemption.install()
    try:
        pid = fork()
        if pid == 0:
            time.sleep(10)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        assert preemption.is_requested_here()
    finally:
        preemption.uninstall()


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
        found = rank_files.read_progress(tmp_path)[3]
        assert (found.local_rank, found.phase, found.step, found.is_watched) == (1, "backward", 7, True)
        with progress.paused("evaluation", 7):
            with progress.paused("generation", 7):
                progress.post("forward", 7)  # a prepared loader inside
            found = rank_files.read_progress(tmp_path)[3]
            assert (found.phase, found.is_watched) == ("evaluation", False)
        found = rank_files.read_progress(tmp_path)[3]
        assert (found.phase, found.is_watched) == ("after evaluation", True)
        progress.leave("done", 7)
        assert not rank_files.read_progress(tmp_path)[3].is_watched
        progress.post("\N{SLEEPING FACE}" * 70, 7)
        assert rank_files.read_progress(tmp_path)[3].phase == "\N{SLEEPING FACE}" * 64
        progress.committed(6)
        assert rank_files.read_progress(tmp_path)[3].committed_step == 6
    finally:
        progress._writer.cache_clear()
        monkeypatch.undo()


def test_posting_without_a_launcher_does_nothing():
    progress._writer.cache_clear()
    progress.post("step", 1)
    progress.committed(1)
    progress.leave("done", 1)
    with progress.paused("pause", 1):
        pass
    progress._writer.cache_clear()


def compare_digests(digests: list[str]) -> str:
    everyone = control.start()
    env.update({"SHARDKIT_CONFIG_DIGEST": digests[dist.get_rank()]})  # the pool restores it
    try:
        compare(Config(), everyone)
    except ConfigError as problem:
        return str(problem)
    return ""


def compare_versions() -> str:
    before, torch.__version__ = torch.__version__, f"2.{dist.get_rank()}.0"
    try:
        compare(Config(), control.start())
    except ConfigError as problem:
        return str(problem)
    finally:
        torch.__version__ = before
    return ""


def test_ranks_with_different_versions_all_refuse(ranks):
    one, other = ranks.run(2, compare_versions)
    given = "shardkit: 0.1.0 with torch 2.0.0 on rank 0, 0.1.0 with torch 2.1.0 on rank 1"
    assert one == f"Accelerator: ranks have different versions (got {given}); install the same on every machine."
    assert other == one


@pytest.mark.fault_row(37)
def test_ranks_of_different_configurations_all_refuse(ranks):
    assert ranks.run(2, compare_digests, ["same", "same"]) == ["", ""]
    one, other = ranks.run(2, compare_digests, ["this", "that"])
    assert one == other
    assert one.startswith("launch: ranks have different configurations (got settings of the launcher alone)")
