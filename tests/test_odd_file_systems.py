"""Saves on file systems that lack something: syncing of folders, locks, a swap of two folders, room."""

import errno
import fcntl
import os
import stat

import pytest

from shardkit.checkpoint.exporting import export
from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving.lock import acquire
from shardkit.cli.main import run
from shardkit.errors import EXIT_CHECKPOINT, CheckpointError, CheckpointSaveError
from tests import checkpoints

pytestmark = pytest.mark.fault_row(47)
SAVE_ID = "0" * 32
DAY_S = 24 * 3600


def save(final, step=1, **request):
    return checkpoints.save(checkpoints.build("plain"), final, step, replace=True, **request)


def no_swap(monkeypatch):
    monkeypatch.setattr(disk, "_exchange_at_once", lambda first, second: False)


@pytest.mark.parametrize("can_swap", [True, False])
@pytest.mark.parametrize("leads", ["to a checkpoint", "nowhere"])
def test_a_linked_step_is_replaced_at_once_or_stays(tmp_path, monkeypatch, can_swap, leads):
    """The link is the only way to a step that was moved to another disk."""
    archive, final = tmp_path / "archive", tmp_path / "checkpoints" / "step-00000001"
    if leads == "to a checkpoint":
        save(archive, 7)
    final.parent.mkdir()
    final.symlink_to(archive)
    if not can_swap:
        no_swap(monkeypatch)
    real = os.rename

    def fails(source, target):
        if str(target) == str(final) and ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    with monkeypatch.context() as patched:
        no_swap(patched)
        patched.setattr(os, "rename", fails)
        with pytest.raises(CheckpointSaveError, match="Input/output error"):
            save(final, in_series=True)
    assert final.is_symlink() and os.readlink(final) == str(archive)
    save(final, in_series=True)
    assert not final.is_symlink() and manifest.read(final).step == 1
    assert leads == "nowhere" or manifest.read(archive).step == 7
    assert sorted(path.name for path in final.parent.iterdir()) == [folder.LATEST, final.name]


@pytest.mark.parametrize("number", ["EINVAL", "ENOTSUP", "EIO"])
def test_a_file_system_that_cannot_sync_folders_gets_checkpoints(tmp_path, monkeypatch, number):
    real = os.fsync

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", files_only)
    if number == "EIO":  # not a missing feature: the disk has failed
        with pytest.raises(CheckpointSaveError, match=r"Input/output error: .*\.tmp-a-"):
            save(tmp_path / "a")
        return
    save(tmp_path / "a")
    assert manifest.read(tmp_path / "a").step == 1


def test_without_locks_a_leftover_of_yesterday_is_deleted(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(fcntl, "lockf", none)
    for name, age_s in (("00000008", 2 * DAY_S), ("00000009", DAY_S // 2)):
        path = tmp_path / f".tmp-step-{name}-{SAVE_ID}"
        path.mkdir()
        was = os.stat(path).st_mtime - age_s
        os.utime(path, (was, was))
    acquire(tmp_path, "run").release()
    save(tmp_path / "step-00000001", in_series=True)
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")]
    assert left == [f".tmp-step-00000009-{SAVE_ID}"]


@pytest.mark.parametrize("name", ["step-00000002", "best"])
def test_a_replacement_that_was_cut_off_is_found_by_every_reader(tmp_path, name):
    save(tmp_path / "step-00000001")
    for reader in (lambda: locate.checkpoint(tmp_path / name).path, lambda: locate.checkpoints(tmp_path)[-1]):
        save(tmp_path / name, 2)
        (tmp_path / name).rename(tmp_path / f".old-{name}")
        assert reader() == tmp_path / name
    if name != "best":
        (tmp_path / name).rename(tmp_path / f".old-{name}")
        assert [found.step for found in folder.candidates(tmp_path)] == [2, 1]


def test_what_a_cut_off_replacement_left_does_not_prevent_the_next(tmp_path, monkeypatch):
    no_swap(monkeypatch)
    save(tmp_path / "best[1]")
    save(tmp_path / ".old-best[1]")
    (tmp_path / f".tmp-best[1]-{SAVE_ID}").mkdir()
    (tmp_path / f".tmp-best[1]-of-all-{SAVE_ID}").mkdir()
    save(tmp_path / "best[1]", 2)
    assert manifest.read(tmp_path / "best[1]").step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".tmp-best[1]-of-all-{SAVE_ID}", "best[1]"]


def test_a_reader_that_puts_the_old_one_back_meanwhile_does_not_fail_the_save(tmp_path, monkeypatch):
    no_swap(monkeypatch)
    save(tmp_path / "a")
    real, seen = os.rename, []

    def rename(source, target):
        real(source, target)
        if str(target).endswith(".old-a") and not seen:
            seen.append(target)
            folder.heal(tmp_path / "a")

    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path / "a", 2)
    assert seen and manifest.read(tmp_path / "a").step == 2


def test_a_replacement_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    no_swap(monkeypatch)
    save(tmp_path / "a")
    real = os.rename

    def rename(source, target):
        if ".tmp-a-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointSaveError, match="holds a complete checkpoint"):
        save(tmp_path / "a", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and manifest.read(tmp_path / "a").step == 1


def test_room_that_a_killed_save_takes_is_free_for_the_next(tmp_path, monkeypatch):
    left = tmp_path / f".tmp-step-00000001-{SAVE_ID}"
    left.mkdir()
    monkeypatch.setattr(disk, "free_bytes", lambda path: 0 if left.exists() else 1 << 30)
    save(tmp_path / "step-00000002", 2, in_series=True)
    assert not left.exists()


def test_a_reader_of_a_read_only_folder_does_not_put_anything_back(tmp_path, monkeypatch):
    save(tmp_path / "step-00000001")
    save(tmp_path / ".old-step-00000002", 2)

    def rename(source, target):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", rename)
    assert [found.step for found in folder.steps(tmp_path)] == [1]


def test_a_checkpoint_that_was_moved_and_linked_is_resumed(tmp_path):
    """Somebody made room on the disk."""
    root, other = tmp_path / "checkpoints", tmp_path / "other"
    other.mkdir()
    for step in (1, 2):
        save(root / f"step-{step:08d}", step, in_series=True)
        (root / f"step-{step:08d}").rename(other / str(step))
        (root / f"step-{step:08d}").symlink_to(other / str(step))
    assert checkpoints.load_newest(checkpoints.build("plain"), root).checkpoint.manifest.step == 2
    save(root / "step-00000003", 3, in_series=True, keep_last=1)
    assert [found.step for found in folder.steps(root)] == [3, 2, 1], "retention deletes no links"
    (root / "step-00000003").rename(other / "3")
    for path in other.iterdir():
        path.rename(tmp_path / path.name)  # as a disk that is not mounted
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be loaded; nothing was changed, and training does"
    ):
        checkpoints.load_newest(checkpoints.build("plain"), root)
    found = run(["checkpoint", "list", str(root)])
    assert found == 0


def test_a_save_into_a_checkpoint_is_refused(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(
        CheckpointSaveError, match=r"a/best is inside the checkpoint .*/a, and would damage it; give ano"
    ):
        save(tmp_path / "a" / "best")
    assert not folder.inspect(tmp_path / "a").additions


@pytest.fixture
def fails(monkeypatch):
    """From `fails("a/model")` on, the disk cannot read files whose path has this."""
    real, bad = os.preadv, []

    def preadv(descriptor, *rest):
        if any(part in os.readlink(f"/proc/self/fd/{descriptor}") for part in bad):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    return bad.append


def test_a_disk_that_fails_is_named_with_its_file(tmp_path, fails, capsys):
    save(tmp_path / "a")
    fails("model/r00000-of-00001.safetensors")
    unread = r"a/model/r00000-of-00001.safetensors: cannot be read \(Input/output error\); look at that disk"
    with pytest.raises(CheckpointError, match=unread):
        checkpoints.load(checkpoints.build("plain"), tmp_path / "a")
    assert run(["checkpoint", "verify", str(tmp_path / "a")]) == EXIT_CHECKPOINT
    assert "r00000-of-00001.safetensors: cannot be read (Input/output error); look at that d" in capsys.readouterr().out


@pytest.mark.parametrize("name", [manifest.NAME, "index.json", "state/common.json", "model/r00000", "optim/r00000"])
@pytest.mark.fault_row(12)
def test_where_the_disk_cannot_read_the_newest_the_one_before_is_resumed(tmp_path, fails, caplog, name):
    live = checkpoints.build("plain")
    checkpoints.train(live, 1)
    for step in (1, 2):
        checkpoints.save(live, folder.step_folder(tmp_path, step), step, in_series=True)
    fails(f"step-00000002/{name}")
    found = checkpoints.load_newest(checkpoints.build("plain", seed=1), tmp_path)
    assert found.checkpoint.manifest.step == 1
    assert "skipped step 2" in caplog.text and "cannot be read (Input/output error)" in caplog.text
    assert "resuming at step 1, 1 step is repeated" in caplog.text
    assert [found.step for found in folder.steps(tmp_path)] == [2, 1], "it may be read again, once the disk is mended"


def test_a_folder_that_cannot_be_listed_any_more_does_not_end_what_has_succeeded(tmp_path, monkeypatch, caplog):
    """Rank 0 alone looks after a commit and after a load: an error there would leave the others in a collective."""
    live = checkpoints.build("plain")
    for step in (1, 2):
        checkpoints.save(live, folder.step_folder(tmp_path, step), step, in_series=True)
    found = folder.candidates(tmp_path)

    def unlisted(root):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(folder, "_on_disk", unlisted)
    checkpoints.save(live, folder.step_folder(tmp_path, 3), 3, in_series=True, keep_last=1)
    assert manifest.read(tmp_path / "step-00000003").step == 3
    assert (
        f"step 3 is saved, but cleaning up failed: checkpoint: {tmp_path}: cannot be read (Input/output" in caplog.text
    )
    with pytest.raises(CheckpointSaveError, match=r"save of step 3 .* failed: a checkpoint with this name exists"):
        checkpoints.save(live, folder.step_folder(tmp_path, 3), 3, in_series=True)
    monkeypatch.setattr(folder, "candidates", lambda root: found)
    assert checkpoints.load_newest(checkpoints.build("plain"), tmp_path).checkpoint.manifest.step == 2


def test_without_locks_the_last_user_of_a_folder_is_not_said_to_have_ended(tmp_path, monkeypatch, caplog):
    (tmp_path / ".lock").write_text('{"run_id": "another", "host": "elsewhere", "pid": 7}')

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    acquire(tmp_path, "run").release()
    assert "a second run in the folder is not detected" in caplog.text and "takes it over" not in caplog.text


def test_what_another_process_deletes_is_left_to_it(tmp_path, monkeypatch):
    """Two runs that save under names of their own into one folder, where no lock keeps one of them out."""
    save(tmp_path / "a")
    seen = []
    monkeypatch.setattr(folder.faults, "reach", lambda *_: seen.append(folder.clean_debris(tmp_path, "b")))
    folder.remove(tmp_path / "a")
    assert seen == [[]] and not [*tmp_path.iterdir()]


def test_what_another_process_deletes_meanwhile_is_no_leftover_to_tell_of(tmp_path, monkeypatch, caplog):
    (tmp_path / f".tmp-step-00000001-{SAVE_ID}").mkdir()
    (tmp_path / f"{export.TEMPORARY}1").mkdir()

    def gone(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(folder, "is_held", gone)
    assert folder.debris(tmp_path) == export.clean_debris(tmp_path) == []
    assert not caplog.text
