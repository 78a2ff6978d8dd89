"""Which checkpoints of a folder may go, and deleting them. Runs after a commit, never before."""

from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shardkit.checkpoint import disk, folder, manifest
from shardkit.checkpoint.folder import FoundCheckpoint
from shardkit.errors import CheckpointError
from shardkit.log import get_logger

PIN = "PIN"  # a file of this name beside a checkpoint, `step-00000120.PIN`, keeps it for good

logger = get_logger(__name__)


def is_pinned(path: Path) -> bool:
    """Whether somebody asked to keep this checkpoint."""
    return path.with_name(f"{path.name}.{PIN}").exists()


def pin(path: Path) -> None:
    """Keep this checkpoint, whatever retention says."""
    path.with_name(f"{path.name}.{PIN}").touch()


def unpin(path: Path) -> None:
    """Leave this checkpoint to retention again."""
    path.with_name(f"{path.name}.{PIN}").unlink(missing_ok=True)


def expendable(
    root: Path,
    keep_last: int,
    keep_every: int = 0,
    protected: Container[str] = (),
    is_good: Callable[[Path], bool] = lambda path: True,
) -> list[FoundCheckpoint]:
    """Checkpoints that retention would delete, oldest first.

    Kept are: the newest `keep_last` that are whole, multiples of `keep_every` steps, pinned ones, those whose save_id
    is in `protected`, and everything that is not a checkpoint of ours or that cannot be read. Steps above the one that
    was committed last belong to a run that was given up; they do not push newer work out, so age counts by commit.

    `is_good` may look into what would be kept, the newest first: a checkpoint that is not good stays, and does not
    count. After a commit nobody looks: reading whole checkpoints would hold up the training.

    A committed checkpoint does not change, so this process reads each manifest once, and looks once at the files of
    those alone that it would count among the newest or delete.
    """
    committed = [(found, record) for found in folder.steps(root) if (record := _record(found.path)) is not None]
    committed.sort(key=lambda item: (item[1].created_utc, item[0].step), reverse=True)
    good = 0
    while committed and good < max(1, keep_last):
        found, record = committed.pop(0)
        good += _is_whole(found.path, record) and is_good(found.path)
    candidates = [
        found
        for found, record in committed
        if record.save_id not in protected
        and not (keep_every and found.step % keep_every == 0)
        and not is_pinned(found.path)
        and _is_whole(found.path, record)
    ]
    return sorted(candidates, key=lambda found: found.step)


class _Record(NamedTuple):
    """What retention goes by; the last three tell one manifest file from another of the same name."""

    created_utc: str
    save_id: str
    inode: int
    modified_ns: int
    bytes: int


def _record(path: Path) -> _Record | None:
    try:
        seen = (path / manifest.NAME).lstat()
        return _read(path, seen.st_ino, seen.st_mtime_ns, seen.st_size)
    except (CheckpointError, OSError):
        return None


@lru_cache(maxsize=4096)
def _read(path: Path, inode: int, modified_ns: int, size: int) -> _Record:
    found = manifest.read(path)
    return _Record(found.created_utc, found.save_id, inode, modified_ns, size)


@lru_cache(maxsize=4096)
def _is_whole(path: Path, record: _Record) -> bool:
    try:
        return not manifest.check_sizes(path, manifest.read(path))
    except (CheckpointError, OSError):
        return False


def apply(root: Path, keep_last: int, keep_every: int = 0, protected: Container[str] = ()) -> list[Path]:
    """Delete what `expendable` names; the folders deleted."""
    return delete(expendable(root, keep_last, keep_every, protected))


def delete(going: Iterable[FoundCheckpoint]) -> list[Path]:
    """Delete these; the folders deleted. A failure to delete is a warning, never an error."""
    removed = []
    for found in going:
        try:
            disk.remove_folder(found.path)
            removed.append(found.path)
        except OSError as error:
            logger.warning("checkpoint: %s: cannot be deleted (%s); delete it by hand.", found.path, error)
    return removed
