"""The lock of a folder of checkpoints, between this process and others."""

import json
import os
from pathlib import Path

import pytest

from shardkit.checkpoint.saving import lock
from shardkit.errors import CheckpointSaveError
from tests import forked


def try_to_lock(root, told):
    try:
        lock.acquire(root, "another run").release()
        told.send("locked")
    except CheckpointSaveError as error:
        told.send(str(error))


def another_process_gets(root, attempt=try_to_lock):
    """What another process that wants the lock gets."""
    here, there = forked.context.Pipe()
    process = forked.context.Process(target=attempt, args=(root, there))
    process.start()
    assert here.poll(120)
    process.join()
    return here.recv()


def try_as_another_user(root, told):
    os.chdir(root)  # which another user may not reach by its whole path
    if os.geteuid() == 0:
        os.setuid(65534)
    try_to_lock(Path(), told)


def test_the_lock_of_another_user_is_told_with_what_to_do(tmp_path):
    (tmp_path / lock.NAME).touch(0o444)
    tmp_path.chmod(0o777)
    said = "checkpoint: .lock: cannot be written (Permission denied), since a run of another user made it; delete it if"
    assert another_process_gets(tmp_path, try_as_another_user).startswith(said)


def hold(root, run_id, ready, leave):
    held = lock.acquire(root, run_id)
    ready.set()
    leave.wait(120)
    held.release()


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock under a name; it ends at `leave`."""
    processes, leave = [], forked.context.Event()

    def start(run_id):
        ready = forked.context.Event()
        processes.append(forked.context.Process(target=hold, args=(tmp_path, run_id, ready, leave)))
        processes[0].start()
        assert ready.wait(120)
        return leave

    yield start
    leave.set()
    for process in processes:
        process.join()


@pytest.mark.fault_row(35)
@pytest.mark.slow
def test_a_lock_that_its_process_has_lost_is_taken_again(tmp_path):
    """The system releases the lock when the process closes the file anywhere, as a copy of the folder does."""
    held = lock.acquire(tmp_path, "this run")
    (tmp_path / lock.NAME).read_bytes()
    assert held.is_in_place()
    assert "another run (process" in another_process_gets(tmp_path)
    held.release()
    assert another_process_gets(tmp_path) == "locked"


@pytest.mark.fault_row(35)
def test_a_lock_that_another_run_has_taken_meanwhile_is_missed(tmp_path, holder):
    held = lock.acquire(tmp_path, "this run")
    (tmp_path / lock.NAME).read_bytes()
    holder("another run")
    assert not held.is_in_place()
    held.release()
    assert json.loads((tmp_path / lock.NAME).read_text())["run_id"] == "another run"
    with pytest.raises(CheckpointSaveError, match=r"another run \(process .* saves into this folder"):
        lock.acquire(tmp_path, "this run")


@pytest.mark.fault_row(35)
def test_two_users_in_one_process_share_a_lock_that_was_lost(tmp_path):
    first = lock.acquire(tmp_path, "this run")
    (tmp_path / lock.NAME).read_bytes()
    second = lock.acquire(tmp_path, "this run")
    first.release()
    assert second.is_in_place() and "another run" in another_process_gets(tmp_path)
    second.release()


def test_a_run_waits_for_a_prune(tmp_path, holder):
    leave = holder(lock.PRUNE)
    calls = []

    def meanwhile():
        calls.append(1)
        leave.set()

    lock.acquire(tmp_path, "this run", prune_s=120.0, meanwhile=meanwhile).release()
    assert calls


def test_a_prune_that_takes_too_long_is_named(tmp_path, holder):
    holder(lock.PRUNE)
    with pytest.raises(CheckpointSaveError, match=r"a prune \(process .*\) prunes this folder; use another folder"):
        lock.acquire(tmp_path, "this run", prune_s=0.0)
