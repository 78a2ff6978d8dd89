"""After a commit only what is needed is looked at, however many checkpoints are kept."""

import errno
import os
import shutil
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
import torch

from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.saving import commit, nan, retention
from shardkit.errors import CheckpointError
from tests import checkpoints
from tests.checkpoints import prepared


@pytest.fixture
def root(tmp_path):
    """Steps 1 to 8 of one line."""
    live = prepared("plain")
    for step in range(1, 9):
        checkpoints.save(live, folder.step_folder(tmp_path, step), step)
    return tmp_path


class Looks:
    """Counts what is read of manifests and looked at of folders, by checkpoint."""

    def __init__(self, monkeypatch):
        self.read, self.walked = [], []
        real_read, real_below = manifest.read, manifest._below
        monkeypatch.setattr(manifest, "read", lambda path: (self.read.append(path.name), real_read(path))[1])
        monkeypatch.setattr(manifest, "_below", lambda path: (self.walked.append(path.name), real_below(path))[1])

    def forget(self):
        self.read, self.walked = [], []


def steps_in(found):
    return [item.step for item in found]


def test_files_are_looked_at_once_and_only_of_those_that_count_or_go(root, monkeypatch):
    looks = Looks(monkeypatch)
    assert steps_in(retention.expendable(root, 3, keep_every=2)) == [1, 3, 5]
    assert sorted(set(looks.walked)) == [f"step-{step:08d}" for step in (1, 3, 5, 6, 7, 8)], "2 and 4 are kept anyway"
    looks.forget()
    assert steps_in(retention.expendable(root, 3, keep_every=2)) == [1, 3, 5]
    assert looks.read == looks.walked == [], "nothing has changed"
    checkpoints.save(prepared("plain"), folder.step_folder(root, 9), 9)
    looks.forget()
    assert steps_in(retention.expendable(root, 3, keep_every=2)) == [1, 3, 5]
    assert set(looks.walked) == {"step-00000009"} and set(looks.read) == {"step-00000009"}


def test_a_checkpoint_that_was_replaced_is_looked_at_again(root):
    assert steps_in(retention.expendable(root, 7)) == [1]
    shutil.rmtree(root / "step-00000001")
    checkpoints.save(prepared("plain"), folder.step_folder(root, 1), 1)
    assert steps_in(retention.expendable(root, 7)) == [2], "it was committed last now"


@pytest.mark.parametrize("has_latest", [True, False])
def test_checkpoints_stay_in_order_where_the_clock_is_set_back(tmp_path, monkeypatch, has_latest):
    class Yesterday(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=1)

    live = prepared("plain")
    checkpoints.save(live, folder.step_folder(tmp_path, 1), 1, in_series=True)
    monkeypatch.setattr(commit, "datetime", Yesterday)
    if not has_latest:  # the folder was copied without it, or the run was killed before it was written
        (tmp_path / folder.LATEST).unlink()
    for step in (2, 3):
        checkpoints.save(live, folder.step_folder(tmp_path, step), step, in_series=True)
    assert steps_in(folder.candidates(tmp_path)) == [3, 2, 1]
    assert steps_in(retention.expendable(tmp_path, 1)) == [1, 2]


@pytest.mark.fault_row(15)
def test_retention_makes_room_for_latest_on_a_full_disk(tmp_path, monkeypatch):
    live = prepared("plain")
    checkpoints.save(live, folder.step_folder(tmp_path, 1), 1, in_series=True, keep_last=1)
    write = disk.replace_json

    def write_where_there_is_room(path, value):
        if folder.step_folder(tmp_path, 1).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, value)

    monkeypatch.setattr(disk, "replace_json", write_where_there_is_room)
    checkpoints.save(live, folder.step_folder(tmp_path, 2), 2, in_series=True, keep_last=1)
    assert steps_in(folder.steps(tmp_path)) == [2]
    assert folder.read_latest(tmp_path) == "step-00000002"


def test_what_is_damaged_does_not_count_and_does_not_go(root):
    for step in (2, 8):
        next((root / f"step-{step:08d}" / "model").iterdir()).unlink()
    os.truncate(root / "step-00000004" / manifest.NAME, 10)
    retention.pin(root / "step-00000003")
    assert steps_in(retention.expendable(root, 2)) == [1, 5]
    assert [path.name for path in retention.apply(root, 2)] == ["step-00000001", "step-00000005"]
    assert retention.apply(root, 2) == []


def test_one_look_at_each_file_tells_whether_a_checkpoint_is_whole(root, monkeypatch):
    path = root / "step-00000001"
    looked = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda where: (looked.append(where), real(where))[1])
    assert manifest.check_sizes(path, manifest.read(path)) == []
    assert len(looked) == len({*looked}) == 1 + sum(item.is_dir() for item in path.iterdir())


def test_what_is_pinned_while_others_are_deleted_is_kept(root):
    going = retention.expendable(root, 5)
    retention.pin(going[1].path)
    assert retention.delete(going) == [going[0].path, going[2].path]
    assert steps_in(folder.steps(root)) == [8, 7, 6, 5, 4, 2]


def test_a_pin_of_a_checkpoint_that_is_gone_is_an_error(root):
    gone = folder.step_folder(root, 1)
    shutil.rmtree(gone)
    with pytest.raises(CheckpointError, match="was deleted before it was pinned"):
        retention.pin(gone)
    assert not retention.is_pinned(gone)


@pytest.mark.parametrize(
    ("values", "dtype", "section", "is_named"),
    [
        ([1.0, torch.nan], torch.float32, "model", True),
        ([1.0, torch.nan], torch.bfloat16, "model_1", True),
        ([1.0, -torch.inf], torch.float32, "model", False),  # a mask
        ([torch.inf, -torch.inf], torch.float16, "model", False),
        ([6e4] * 4, torch.float16, "model", False),
        ([1.0, torch.nan], torch.float64, "optim", False),
        ([1, 2], torch.int64, "model", False),
    ],
)
def test_weights_with_nan_are_named(values, dtype, section, is_named):
    for packed in ((), (section, "weight")):
        prepared = SimpleNamespace(nan=[], packed={packed})
        for _ in range(2):
            nan.note(prepared, section, "weight", torch.tensor(values, dtype=dtype))
        assert prepared.nan == (["weight"] if is_named and not packed else [])
