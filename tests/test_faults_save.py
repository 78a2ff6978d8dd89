"""Saves that die or fail at every step of the protocol: what is left is the old state or the new one, never a mix."""

import os
import re
import resource
import signal
from types import SimpleNamespace

import pytest
import torch

from shardkit.checkpoint import faults
from shardkit.checkpoint.files import folder, manifest
from shardkit.checkpoint.saving import additions, put
from shardkit.errors import CheckpointError, CheckpointSaveError
from tests import checkpoints, forked
from tests.checkpoints import fill, prepared, resumed_step, values_in

KINDS = {"sharded": ("fsdp", "sharded"), "full": ("fsdp", "full"), "ddp": ("ddp", "sharded")}
# Where both ranks pass; the others belong to rank 0.
BOTH = ("preflight", "open", "write", "fsync", "close", "agree-1", "agree-2")
# A kill after the rename leaves the new step.
PUBLISHED = ("sync-root", "agree-2", "latest", "retention", "trash")


def save_one(live, root, step, kind, **request):
    fill(live, step)
    checkpoints.save(live, folder.step_folder(root, step), step, kind, in_series=True, **{"keep_last": 2, **request})


def save_twice(root, mode, fault, keep_last=2):
    """Step 1 is saved; saving step 2 meets a fault. What the rank was told."""
    strategy, kind = KINDS[mode]
    live = prepared(strategy)
    save_one(live, root, 1, kind)
    forked.arm(fault)
    try:
        save_one(live, root, 2, kind, keep_last=keep_last)
    except CheckpointSaveError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.fault_row(1)
@pytest.mark.fault_row(5)
@pytest.mark.fault_row(6)
@pytest.mark.parametrize("point", faults.SAVE_POINTS)
def test_killed_at_any_point_the_old_or_the_new_state_is_whole(tmp_path, point):
    keep_last = 1 if point == "trash" else 2  # in the middle of the deletion of step 1
    outcomes = forked.run(2, save_twice, tmp_path, "sharded", f"{point}:*:kill", keep_last)
    assert f"{point}.0" in outcomes[0].marks, "the fault did not fire"
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert resumed_step(tmp_path) == (2 if point in PUBLISHED else 1)
    folder.clean_debris(tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith((".tmp", ".trash", ".old"))]


@pytest.mark.slow
@pytest.mark.fault_row(1)
@pytest.mark.parametrize("mode", ["full", "ddp"])
@pytest.mark.parametrize("point", ["write", "agree-1", "manifest", "rename"])
def test_killed_at_any_point_in_the_other_kinds(tmp_path, point, mode):
    outcomes = forked.run(2, save_twice, tmp_path, mode, f"{point}:*:kill")
    assert f"{point}.0" in outcomes[0].marks
    assert resumed_step(tmp_path) == (2 if point in PUBLISHED else 1)


@pytest.mark.slow
@pytest.mark.fault_row(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", BOTH)
def test_when_one_rank_dies_the_other_is_told_and_the_old_state_loads(tmp_path, point, rank):
    outcomes = forked.run(2, save_twice, tmp_path, "sharded", f"{point}:{rank}:kill")
    assert outcomes[0].marks == {f"{point}.{rank}"}
    survivor = outcomes[1 - rank]
    assert survivor.error is None
    if (point, rank) == ("agree-2", 1):  # the step was committed, and both knew, before it died
        assert survivor.value == "saved"
    else:
        assert "save of step 2" in survivor.value and "a rank died" in survivor.value
        assert "Last checkpoint: step 1" in survivor.value
    assert resumed_step(tmp_path) == (2 if point == "agree-2" else 1)


def save_and_fail(root, mode, fault, keep_last=2):
    """As `save_twice`, and then a third save without a fault goes through."""
    told = save_twice(root, mode, fault)
    forked.arm(None)
    live = prepared(KINDS[mode][0])
    fill(live, 3)
    after = resumed_step(root)
    checkpoints.save(live, folder.step_folder(root, 3), 3, KINDS[mode][1], in_series=True, keep_last=keep_last)
    return told, after


ERRORS = [
    ("write:1:raise=ENOSPC", "sharded", "No space left on device"),
    ("fsync:0:raise=EIO", "sharded", "Input/output error"),
    ("close:1:raise=ENOSPC", "full", "No space left on device"),
    ("manifest:0:raise=ENOSPC", "sharded", "No space left on device"),
    ("temporary:0:raise=EROFS", "ddp", "Read-only file system"),
    ("open:1:raise=EACCES", "full", "Permission denied"),
    ("rename:0:raise=EIO", "full", "Input/output error"),
]


@pytest.mark.slow
@pytest.mark.fault_row(14)
@pytest.mark.fault_row(15)
@pytest.mark.fault_row(16)
@pytest.mark.parametrize(("fault", "mode", "text"), ERRORS)
def test_an_error_on_one_rank_is_raised_on_all(tmp_path, fault, mode, text):
    outcomes = forked.run(2, save_and_fail, tmp_path, mode, fault, 1)
    assert all(outcome.error is None for outcome in outcomes), outcomes
    assert outcomes[0].value == outcomes[1].value
    told, step_after = outcomes[0].value
    assert text in told and f"rank {fault.split(':')[1]} (host " in told and str(tmp_path) in told
    assert "Last checkpoint: step 1" in told and step_after == 1
    assert [found.step for found in folder.steps(tmp_path)] == [3]


def save_under_a_limit(root):
    live = prepared("fsdp")
    save_one(live, root, 1, "sharded")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        save_one(live, root, 2, "sharded")
    except CheckpointSaveError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "saved"


@pytest.mark.fault_row(14)
def test_the_operating_system_refuses_to_write_more(tmp_path):
    outcomes = forked.run(2, save_under_a_limit, tmp_path)
    assert outcomes[0].value == outcomes[1].value and "File too large: " in outcomes[0].value
    assert ".safetensors" in outcomes[0].value
    assert resumed_step(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def save_without_room(root):
    from shardkit.checkpoint.files import disk

    live = prepared("plain")
    found, disk.free_bytes = disk.free_bytes, lambda path: 7_400_000
    try:
        big = torch.nn.Linear(3000, 1000, bias=False)
        checkpoints.save(checkpoints.state.Live([big]), root / "c")
    except CheckpointSaveError as error:
        return str(error)
    finally:
        disk.free_bytes = found
    return str(live)


@pytest.mark.fault_row(14)
def test_room_is_looked_for_before_anything_is_written(ranks, tmp_path):
    (told,) = ranks.run(1, save_without_room, tmp_path)
    assert f"No space left on device: need 13.0 MiB, 7.1 MiB free in {tmp_path}" in told
    assert not list(tmp_path.iterdir())


def save_over(root):
    live = prepared("fsdp")
    save_one(live, root, 1, "sharded")
    before = manifest.self_digest(folder.step_folder(root, 1))
    try:
        save_one(live, root, 1, "sharded")
    except CheckpointSaveError as error:
        assert manifest.self_digest(folder.step_folder(root, 1)) == before
        return str(error)
    return "saved"


@pytest.mark.fault_row(4)
def test_a_step_is_written_once(ranks, tmp_path):
    told = ranks.run(2, save_over, tmp_path)
    assert told[0] == told[1] and "a checkpoint with this name exists, and checkpoints are not overwritten" in told[0]
    assert f"{tmp_path / 'step-00000001'} holds a complete checkpoint" in told[0]


def replace_once(root, fault):
    live = prepared("fsdp")
    fill(live, 1)
    checkpoints.save(live, root / "mine", 1)
    if torch.distributed.get_rank() == 0:
        (root / "mine" / "notes").mkdir()
        (root / "mine" / "notes" / "epoch.json").write_text("1")
    fill(live, 2)
    forked.arm(fault)
    checkpoints.save(live, root / "mine", 2, replace=True)


@pytest.mark.slow
@pytest.mark.fault_row(4)
@pytest.mark.parametrize("point", ["write", "rename", "sync-root"])
def test_a_replacement_that_dies_leaves_one_whole(tmp_path, point):
    outcomes = forked.run(2, replace_once, tmp_path, f"{point}:0:kill")
    assert outcomes[0].exit_code == -signal.SIGKILL and f"{point}.0" in outcomes[0].marks
    live = prepared("plain")
    step = checkpoints.load(live, tmp_path / "mine").checkpoint.manifest.step
    assert values_in(live) == {float(step)} and step == (2 if point == "sync-root" else 1)
    assert (tmp_path / "mine/notes/epoch.json").read_text() == "1", "a file of the script is lost"


def cannot_write(root):
    os.chmod(root, 0o500)
    try:
        checkpoints.save(prepared("plain"), root / "c")
    except CheckpointSaveError as error:
        return str(error)
    finally:
        os.chmod(root, 0o700)
    return "saved"


@pytest.mark.fault_row(16)
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(ranks, tmp_path):
    (told,) = ranks.run(1, cannot_write, tmp_path)
    assert "Permission denied" in told


def save_apart(root):
    """Ranks on machines of their own, simulated by working folders of their own."""
    import torch.distributed as dist

    put.SHARED_STORAGE_WAIT_S = 0.5
    mine = root / f"machine-{dist.get_rank()}"
    mine.mkdir()
    os.chdir(mine)
    try:
        checkpoints.save(prepared("fsdp"), "c")
    except CheckpointSaveError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.fault_row(36)
def test_storage_that_is_not_shared_is_noticed(tmp_path):
    outcomes = forked.run(2, save_apart, tmp_path)
    assert outcomes[0].value == outcomes[1].value
    assert "not shared by all ranks" in outcomes[0].value and "rank 1 (host " in outcomes[0].value
    assert not list((tmp_path / "machine-0").iterdir())


@pytest.mark.fault_row(36)
def test_a_new_folder_that_nfs_shows_after_a_minute_is_waited_for(tmp_path, monkeypatch):
    """Its default acdirmax: so long a machine may take a folder for missing that it has looked for at the start."""
    now_s = 0.0

    def sleep(seconds):
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(put, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=sleep))
    monkeypatch.setattr(put, "os", SimpleNamespace(listdir=lambda path: [additions.PROBE] if now_s > 59 else []))
    put.wait_until_seen(tmp_path)


def load_apart(root):
    """As `save_apart`: only the machine of rank 1 has a checkpoint."""
    import torch.distributed as dist

    mine = root / f"machine-{dist.get_rank()}"
    mine.mkdir(exist_ok=True)
    os.chdir(mine)
    try:
        return checkpoints.load_newest(prepared("fsdp"), "checkpoints")
    except CheckpointError as error:
        return str(error)


@pytest.mark.fault_row(36)
def test_a_checkpoint_that_only_another_machine_has_is_no_fresh_start(tmp_path):
    checkpoints.save(prepared("plain"), tmp_path / "machine-1" / "checkpoints" / "step-00000003", step=3)
    outcomes = forked.run(2, load_apart, tmp_path)
    assert outcomes[0].value == outcomes[1].value
    assert re.fullmatch(
        r"checkpoint: checkpoints: rank 0 \(host \S+\) finds no checkpoint here, rank 1 \(host \S+\) finds step 3; "
        "use storage that all ranks share.",
        outcomes[0].value,
    )
