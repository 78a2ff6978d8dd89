"""`shardkit checkpoint prune`: which checkpoints and leftovers it deletes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from shardkit.checkpoint.files import manifest
from shardkit.checkpoint.saving import lock, retention
from shardkit.errors import CheckpointError
from shardkit.storage import objects
from shardkit.storage.url import Place, Url


def prune(
    root: Place, keep_last: int, keep_every: int, dry_run: bool, damages: Callable[[Place], list[str]]
) -> dict[str, Any]:
    """Deletes older checkpoints and files of killed saves; says which, and what is damaged among those that are kept.

    CheckpointSaveError where a run saves into the folder.
    """
    verified: dict[tuple[Place, str], list[str]] = {}

    def is_good(found: Place) -> bool:
        if (save_id := _save_id(found)) is None:  # another process deletes it
            return False
        key = found, save_id
        if key not in verified:
            problems = damages(found)
            if problems and _save_id(found) != save_id:  # it was deleted, or saved anew, while it was read
                return False
            verified[key] = problems
        return not verified[key]

    alone = nullcontext if dry_run else partial(_no_run_in, root)
    with alone():
        pass
    # The long part, without the lock: a run that begins meanwhile would wait for it.
    retention.expendable(root, keep_last, keep_every, is_good=is_good)
    with alone():
        going = retention.expendable(root, keep_last, keep_every, is_good=is_good)
        left = retention.debris(root)
        freed = {found: _bytes_below(found) for found in [*left, *(found.path for found in going)]}
        removed = [found.path for found in going]
        if not dry_run:
            left, removed = retention.clean_debris(root), retention.delete(going)
    return {
        "removed": [str(found) for found in removed],
        "debris": [str(found) for found in left],
        "bytes": sum(freed.get(found, 0) for found in [*removed, *left]),
        "damaged": [problem for problems in verified.values() for problem in problems],
        "dry_run": dry_run,
    }


def _save_id(found: Place) -> str | None:
    """Which save the checkpoint is of; None where it is there no more, or has no manifest that can be read."""
    try:
        return manifest.read(found).save_id
    except (CheckpointError, OSError):
        return None


@contextmanager
def _no_run_in(root: Place) -> Iterator[None]:
    """A context in which no run can save into the folder. Raises CheckpointSaveError if one does. A store has no
    locks."""
    if isinstance(root, Url):
        yield
        return
    held = lock.acquire(root, lock.PRUNE, "prune after it has ended")
    try:
        yield
    finally:
        held.release()


def _bytes_below(folder: Place) -> int:
    """The size of what is there. Of a folder that another process deletes meanwhile: 0."""
    if isinstance(folder, Url):
        return sum(seen.bytes for seen in objects.below(folder).values())
    try:
        return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    except FileNotFoundError:
        return 0
