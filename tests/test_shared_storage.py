"""What a run is told at its start of a folder that its ranks cannot save into together."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from shardkit import Accelerator, ProjectConfiguration
from shardkit.checkpoint.saving import shared_storage
from tests.ranks import log_lines

CPU = {"num_processes": 2, "use_cpu": True, "distributed_type": "MULTI_GPU"}


def answer(host: str, kind: str, machine: str = "", refused: str = "") -> list[str]:
    return ["/runs", host, machine or host, kind, refused]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([answer("a", "ext4"), answer("b", "ext4")], "/runs: rank 0 (host a) has it on its own disk (ext4)"),
        ([answer("a", "nfs4"), answer("b", "overlay")], "/runs: rank 1 (host b) has it on its own disk (overlay)"),
        ([answer("a", "nfs4"), answer("b", "nfs4")], ""),
        ([answer("a", "fuse.weka"), answer("b", "")], ""),
        ([answer("pod-0", "ext4", "one"), answer("pod-1", "ext4", "one")], ""),
        ([None, answer("b", "ext4")], ""),
        ([answer("a", "nfs4"), answer("b", "nfs4", "", "no permission for /")], "/runs: rank 1 (host b) cannot write"),
    ],
)
def test_only_what_is_certain_is_said(answers, says):
    assert shared_storage.judged(answers).startswith(says) and bool(says) == bool(shared_storage.judged(answers))


def warned(folder: Path, named: bool, kind: str) -> list[str]:
    """The warnings of a new Accelerator, where rank 1 seems to run on another machine, with this file system."""
    rank, at = dist.get_rank(), shared_storage
    (folder / f"boot-{rank}").write_text(f"machine-{rank}\n")
    mounts = f"22 1 8:1 / / rw - ext4 /dev/sda rw\n23 22 0:9 / {folder}/my\\040runs rw - {kind} server:/x rw\n"
    (folder / f"mounts-{rank}").write_text(mounts)
    (folder / "my runs").mkdir(exist_ok=True)
    before = at.BOOT, at.MOUNTS
    at.BOOT, at.MOUNTS = folder / f"boot-{rank}", folder / f"mounts-{rank}"
    project = ProjectConfiguration(project_dir=str(folder / "my runs"), automatic_checkpoint_naming=named)
    try:
        with log_lines("shardkit.runtime.project") as lines:
            Accelerator(config=CPU, project_config=project)
    finally:
        at.BOOT, at.MOUNTS = before
    return lines


def test_a_disk_of_one_machine_is_told_before_training(ranks, tmp_path):
    first, second = ranks.run(2, warned, tmp_path, True, "xfs")
    assert second == [] and len(first) == 1
    assert f"checkpoint: {tmp_path}/my runs/checkpoints: rank 0 (host" in first[0]
    assert "on its own disk (xfs), which others do not see: save_state() will fail; use a folder that" in first[0]
    assert ranks.run(2, warned, tmp_path, True, "nfs4") == [[], []]
    assert ranks.run(2, warned, tmp_path, False, "xfs") == [[], []]


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    for at in (tmp_path / "file", tmp_path / "file" / "runs"):
        caplog.clear()
        Accelerator(project_config=ProjectConfiguration(project_dir=str(at), automatic_checkpoint_naming=True))
        assert f"cannot write there ({tmp_path}/file is not a folder): save_state() will fail" in caplog.text
    caplog.clear()
    free = ProjectConfiguration(project_dir=str(tmp_path / "new" / "runs"), automatic_checkpoint_naming=True)
    Accelerator(project_config=free)
    assert not caplog.text and not (tmp_path / "new").exists()


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
@pytest.mark.parametrize(
    ("flag", "says"), [(os.ST_RDONLY, "the file system of {} is read-only"), (0, "no permission for {}")]
)
def test_a_read_only_file_system_is_told_apart_from_missing_permission(tmp_path, monkeypatch, flag, says):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flag))
    assert shared_storage._refusal(tmp_path) == says.format(tmp_path)
