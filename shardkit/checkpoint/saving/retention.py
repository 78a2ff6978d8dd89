"""Which checkpoints of a folder are deleted, and deleting them. Runs after a commit, never before."""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.checkpoint.files import disk, folder, manifest, paths
from shardkit.checkpoint.files.folder import FoundCheckpoint
from shardkit.checkpoint.saving import in_store
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage import objects
from shardkit.storage.url import Place, Url

PIN = "PIN"  # a file `step-00000120.PIN` next to a checkpoint protects it from retention
# More than a folder has: a cache that is smaller than what is read in the same order each time never has the next one.
_CACHED = 1 << 17

log = get_logger(__name__)


def _pins_of(path: Place) -> tuple[Place, Place]:
    """The files that protect a checkpoint: beside its folder; for a link also beside the link."""
    place = paths.real(path)
    return place.with_name(f"{place.name}.{PIN}"), path.with_name(f"{path.name}.{PIN}")


def is_pinned(path: Place) -> bool:
    """Whether this checkpoint is pinned."""
    return any(
        objects.look(file) is not None if isinstance(file, Url) else disk.is_there(file) for file in {*_pins_of(path)}
    )


def pin(path: Place) -> None:
    """Protect this checkpoint from retention, at the folder that a link leads to. Raises CheckpointError if retention
    was faster."""
    file, _ = _pins_of(path)
    objects.put(file, b"{}") if isinstance(file, Url) else file.touch()
    if not manifest.exists(path):
        unpin(path)
        raise CheckpointError(f"{path}: was deleted before it was pinned; pin another one.")


def unpin(path: Place) -> None:
    """Remove the protection of `pin`."""
    for file in {*_pins_of(path)}:
        objects.remove(file) if isinstance(file, Url) else file.unlink(missing_ok=True)


def expendable(
    root: Place,
    keep_last: int,
    keep_every: int = 0,
    protected: Container[str] = (),
    is_good: Callable[[Any], bool] = lambda path: True,
) -> list[FoundCheckpoint]:
    """Checkpoints that retention would delete, oldest first.

    Kept are: the newest `keep_last` complete ones, multiples of `keep_every` steps, pinned ones, those whose save_id is
    in `protected`, links, and everything that is not a shardkit checkpoint or cannot be read. The newest is the one
    that was committed last: higher steps can exist from before a run resumed from an earlier step. Where the weights of
    all the newest are NaN, the newest whose are not is kept, too.

    `is_good(path)` may check the contents of those that would count among the newest: one that is not good is kept, but
    not counted. It is not used after a commit, since reading whole checkpoints would delay training.

    A committed checkpoint does not change. So each manifest is read once per process, and the files are checked once,
    and only of checkpoints that would be counted or deleted.
    """
    committed = _committed(root)
    newest: list[_Record] = []
    while committed and len(newest) < max(1, keep_last):
        found, record = committed.pop(0)
        if _is_whole(found.path, record) and is_good(found.path):
            newest.append(record)
    before_nan = None
    if all(record.is_nan for record in newest):
        before_nan = next((found for found in _without_nan(committed) if is_good(found.path)), None)
    candidates = [
        found
        for found, record in committed
        if found is not before_nan
        and record.save_id not in protected
        and not (keep_every and found.step % keep_every == 0)
        and not is_pinned(found.path)
        and not (isinstance(found.path, Path) and found.path.is_symlink())
        and _is_whole(found.path, record)
    ]
    return sorted(candidates, key=lambda found: found.step)


def newest_without_nan(root: Place) -> Place | None:
    """The complete checkpoint in a folder that was committed last and has no NaN among its weights; of the series, or
    named by the script."""
    named = [FoundCheckpoint(-1, path) for path in folder.named_otherwise(root)]
    return next((found.path for found in _without_nan(_committed_last_first([*folder.steps(root), *named]))), None)


def times(root: Place) -> list[str]:
    """When the checkpoints of the series were committed, by their manifests."""
    return [record.created_utc for _, record in _committed(root)]


class _Record(NamedTuple):
    """What retention needs of a manifest; `version` differs if the manifest file was replaced."""

    created_utc: str
    save_id: str
    is_nan: bool
    version: Hashable


def _committed(root: Place) -> list[tuple[FoundCheckpoint, _Record]]:
    """The checkpoints of the series, the one that was committed last first."""
    return _committed_last_first(folder.steps(root))


def _committed_last_first(places: Iterable[FoundCheckpoint]) -> list[tuple[FoundCheckpoint, _Record]]:
    known = [(found, record) for found in places if (record := _record(found.path)) is not None]
    return sorted(known, key=lambda item: (item[1].created_utc, item[0].step), reverse=True)


def _without_nan(committed: Iterable[tuple[FoundCheckpoint, _Record]]) -> Iterator[FoundCheckpoint]:
    """The complete ones whose weights are not NaN."""
    return (found for found, record in committed if not record.is_nan and _is_whole(found.path, record))


def _record(path: Place) -> _Record | None:
    try:
        return _read(path, _version(path))
    except (CheckpointError, OSError):
        return None


def _version(path: Place) -> Hashable:
    if isinstance(path, Url):
        return objects.look(path / manifest.NAME)
    seen = (path / manifest.NAME).lstat()
    return seen.st_ino, seen.st_mtime_ns, seen.st_size


@lru_cache(maxsize=_CACHED)
def _read(path: Place, version: Hashable) -> _Record:
    found = manifest.read(path)
    return _Record(found.created_utc, found.save_id, bool(found.nan), version)


@lru_cache(maxsize=_CACHED)
def _is_whole(path: Place, record: _Record) -> bool:
    try:
        return not manifest.check_sizes(path, manifest.read(path))
    except (CheckpointError, OSError):
        return False


def apply(root: Place, keep_last: int, keep_every: int = 0, protected: Container[str] = ()) -> list[Place]:
    """Delete the checkpoints that `expendable` returns. Returns the deleted folders."""
    return delete(expendable(root, keep_last, keep_every, protected))


def delete(going: Iterable[FoundCheckpoint]) -> list[Place]:
    """Delete these checkpoints, but not those that were pinned meanwhile, since deleting many takes minutes. Returns
    the deleted folders. A failure to delete is a warning, never an error."""
    removed: list[Place] = []
    for found in going:
        try:
            if is_pinned(found.path):
                continue
            if isinstance(found.path, Url):
                in_store.remove(found.path)
            else:
                folder.remove(found.path)
            removed.append(found.path)
        except (CheckpointError, OSError) as error:
            log.warning("checkpoint: %s: cannot be deleted (%s); delete it manually.", found.path, error)
    return removed


def debris(root: Place) -> list[Place]:
    """What killed saves left in a folder of checkpoints, without files of saves that may still run."""
    if not isinstance(root, Url):
        return [*folder.debris(root)]
    with in_store.now(root) as mark:
        return [files for _, files in in_store.dead(root, None, mark)]


def clean_debris(root: Place) -> list[Place]:
    """Delete `debris`. Returns what was deleted."""
    if not isinstance(root, Url):
        return [*folder.clean_debris(root)]
    with in_store.now(root) as mark:
        return [*in_store.collect(root, None, mark)]
