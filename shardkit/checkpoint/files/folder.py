"""Names inside a folder of checkpoints, and which of them are checkpoints.

LATEST                   names the newest checkpoint; a hint for other programs, since shardkit scans the folder
step-00000120/           a committed checkpoint: it gets this name by one rename, when it is complete
.tmp-<name>-<save_id>/   a save that is running or was killed
.old-<name>/             the replaced checkpoint, during a replacement on systems without an atomic swap
.trash-<id>/             a folder that is being deleted
"""

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardkit.checkpoint import faults
from shardkit.checkpoint.files import disk, manifest
from shardkit.checkpoint.files.manifest import Manifest
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage import objects
from shardkit.storage.url import Place, Url
from shardkit.wording import words

LATEST = "LATEST"
STEP = re.compile(r"step-(\d{8,18})")
_OLD = ".old-"
# Where the file system has no locks, a folder in which nothing was created for so long belongs to a dead process.
_DEAD_AFTER_S = 24 * 3600.0

log = get_logger(__name__)
PlaceKind = TypeVar("PlaceKind", Path, Url)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder with the name of a checkpoint. It may be invalid: `manifest.read` checks that."""

    step: int
    path: Place


@dataclass(frozen=True)
class SkippedFolder:
    """A checkpoint that cannot be used, and why."""

    step: int
    path: Place
    reason: str


def step_folder(root: Place, step: int) -> Place:
    """The folder of a step's checkpoint."""
    return root / step_name(step)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_folder(final: PlaceKind, save_id: str) -> PlaceKind:
    """Where a save is written before it is committed. In a store: an object that marks a running save."""
    return final.with_name(f".tmp-{final.name}-{save_id}")


def steps(root: Place) -> list[FoundCheckpoint]:
    """Everything in a folder that is named step-*, highest step first; also a link to a checkpoint that somebody moved
    to another disk, and one that leads nowhere, which a resume must not take for no checkpoint."""
    try:
        paths = _in_store(root) if isinstance(root, Url) else _on_disk(root)
    except OSError as error:
        raise unreadable(root, error) from error
    found = [FoundCheckpoint(int(match[1]), path) for path in paths if (match := STEP.fullmatch(path.name))]
    return sorted(found, key=lambda item: item.step, reverse=True)


def taken(place: Place, reason: str) -> FileExistsError:
    """The error of a save whose place may not be replaced."""
    return FileExistsError(errno.EEXIST, reason, str(place))


def unreadable(place: Place, error: OSError) -> CheckpointError:
    """The error of a place that the disk or the store does not let be read."""
    reason = f"cannot be read ({error.strerror}); check its permissions."
    if isinstance(place, Url):
        reason = objects.reason_of(error, "read")
    return CheckpointError(f"checkpoint: {place}: {reason}")


def _on_disk(root: Path) -> list[Path]:
    # Not is_dir(), which from Python 3.14 on is also False where the disk does not tell.
    return [path for path in _entries(root) if STEP.fullmatch(path.name) and (path.is_symlink() or not path.is_file())]


def _entries(root: Path) -> list[Path]:
    """What is in a folder, after `heal` of what a crash left under an `.old-` name alone."""
    try:
        found = {path.name: path for path in root.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        _refuse_lost(root)
        found = {}
    for name in [name for name in found if name.startswith(_OLD)]:
        final = root / name.removeprefix(_OLD)
        if final.name not in found:
            heal(final)
            found |= {final.name: final} if final.exists() else {}
    return [*found.values()]


def make(root: Path) -> None:
    """Make a folder for checkpoints, where there is none."""
    _refuse_lost(root)
    root.mkdir(parents=True, exist_ok=True)


def _refuse_lost(root: Path) -> None:
    """Raises CheckpointError if the path is below a link that leads nowhere: a run must not start afresh there."""
    for path in (root, *root.parents):
        if path.is_symlink() and not disk.is_there(path):
            to = os.readlink(path)
            raise CheckpointError(
                f"checkpoint: {path}: is a link to {to}, where nothing is; mount that disk, or remove the link."
            )


def _in_store(root: Url) -> list[Url]:
    """Those with a manifest, since a checkpoint in a store exists once its manifest does. Listings can be stale: each
    listed name is checked, and so is the name in LATEST."""
    listed = {name for name in objects.names(root) if STEP.fullmatch(name)}
    latest = read_latest(root)
    return [root / name for name in listed | ({latest} if latest else set()) if manifest.exists(root / name)]


def named_otherwise(root: Place) -> list[Place]:
    """Checkpoints in a folder that the script named (`save_state("out/best")`), damaged ones first, then the oldest.
    Links are ignored."""
    if isinstance(root, Url):
        paths: list[Place] = [root / name for name in objects.names(root)]
    else:
        paths = [path for path in _entries(root) if not path.is_symlink()]
    found = []
    for path in paths:
        if path.name.startswith(".") or STEP.fullmatch(path.name):
            continue
        try:
            if manifest.exists(path):
                found.append((manifest.read(path).created_utc, path.name, path))
        except CheckpointError:
            if not manifest.is_of_another_program(path):
                found.append(("", path.name, path))
        except OSError:
            if isinstance(root, Url):  # the store does not answer; on a disk, folders without permission are skipped
                raise
    return [path for _, _, path in sorted(found)]


def candidates(root: Place) -> list[FoundCheckpoint]:
    """As `steps`, in the order in which a resume tries them: the one committed last comes first, even if its step is
    lower.

    A run that resumed from an earlier step leaves higher steps behind that it no longer uses. Those without a readable
    manifest come first if their step is the highest, so that the resume reports them, else last.
    """
    committed, unreadable = [], []
    for found in steps(root):
        try:
            committed.append((manifest.read(found.path).created_utc, found))
        except CheckpointError:
            unreadable.append(found)
        except OSError:
            if isinstance(root, Url):  # the store does not answer, so the newest checkpoint is unknown
                raise
            unreadable.append(found)
    committed.sort(key=lambda item: (item[0], item[1].step), reverse=True)
    highest = committed[0][1].step if committed else -1
    above = [found for found in unreadable if found.step > highest]
    return [*above, *(found for _, found in committed), *(found for found in unreadable if found not in above)]


def checkpoint_around(path: Path) -> Path | None:
    """The checkpoint that this folder is in, or would be: no place for files of another. None if there is none."""
    for parent in path.resolve().parents:
        # Another program may use the name MANIFEST.json in a parent folder, so index.json is required, too.
        if all(os.path.exists(parent / name) for name in (manifest.NAME, "index.json")):
            return parent
    return None


def inspect(path: Place) -> Manifest:
    """The manifest of a checkpoint, after a check that all its files exist with the right sizes. Raises CheckpointError
    with the reason otherwise."""
    if isinstance(path, Path):
        heal(path)
    found = manifest.read(path)
    problems = manifest.check_sizes(path, found)
    if problems and manifest.is_replaced(path, found):
        return inspect(path)
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError("; ".join(problems[:3]) + more + ".")
    return found


def newest_valid(root: Place) -> tuple[FoundCheckpoint | None, list[SkippedFolder]]:
    """The newest checkpoint with a valid manifest and all files in the right sizes, and the newer ones without. Reads
    no tensor."""
    skipped = []
    for found in candidates(root):
        try:
            inspect(found.path)
        except (CheckpointError, OSError) as error:
            if isinstance(root, Url) and isinstance(error, OSError):
                raise
            skipped.append(SkippedFolder(found.step, found.path, words(error)))
        else:
            return found, skipped
    return None, skipped


def write_latest(root: Place, final: Place, record: Manifest) -> None:
    """Point LATEST at a committed checkpoint."""
    disk.replace_json(root / LATEST, {"step": record.step, "dir": final.name, "save_id": record.save_id})


def read_latest(root: Place) -> str | None:
    """The folder name in LATEST; None if it is missing or invalid. Raises OSError if a store does not answer, since
    LATEST may name a checkpoint that a listing does not show yet."""
    try:
        value = disk.from_json(disk.read_small(root, LATEST), str(root / LATEST))
        return value["dir"] if STEP.fullmatch(value["dir"]) else None
    except (CheckpointError, KeyError, TypeError):
        return None
    except OSError:
        if isinstance(root, Url):
            raise
        return None


def heal(final: Path) -> None:
    """Rename the checkpoint back that a crash in the middle of a replacement left under its `.old-` name."""
    if not final.name:  # the root of the file system
        return
    aside = final.with_name(f"{_OLD}{final.name}")
    if aside.is_dir() and not final.exists():
        with suppress(OSError):  # the writer was faster, or the file system is read-only
            os.rename(aside, final)


def hold(temporary: Path) -> int:
    """A descriptor that locks the folder, which marks it as in use. The lock ends with the process, or when the
    descriptor is closed."""
    descriptor = disk.open_folder(temporary)
    with suppress(OSError):  # the file system may not support locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove(path: Path) -> None:
    """Delete a folder. It is renamed first, so that a partly deleted folder is never seen under its name, and held, so
    that no other process takes it for a leftover meanwhile."""
    trash = path.with_name(f".trash-{uuid.uuid4().hex[:8]}")
    descriptor = hold(path)
    try:
        os.rename(path, trash)
        faults.reach("trash", 0)
        shutil.rmtree(trash)
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process is writing this folder; see `hold`."""
    descriptor = disk.open_folder(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:  # the file system does not support locks
        return time.time() - os.fstat(descriptor).st_mtime < _DEAD_AFTER_S
    finally:
        os.close(descriptor)


def debris(root: Path, name: str | None = None) -> list[Path]:
    """Folders left by killed saves of one checkpoint, or of all; without those of running saves."""
    temporary, which = "step-.*", "step-.*"
    if name:
        which = re.escape(name)
        temporary = f"{which}-[0-9a-f]{{32}}(-hooks)?"  # not that of a longer name
    left = re.compile(rf"\.tmp-{temporary}|{re.escape(_OLD)}{which}|\.trash-.*")
    found = []
    for path in sorted(_entries(root)):
        if not left.fullmatch(path.name):
            continue
        try:
            if path.is_dir() and not path.is_symlink() and not is_held(path) and not _is_needed(path):
                found.append(path)
        except FileNotFoundError:  # another process has deleted it meanwhile
            continue
        except OSError as error:
            log.warning("checkpoint: %s: leftover of a killed save, cannot be read (%s).", path, error)
    return found


def clean_debris(root: Path, name: str | None = None) -> list[Path]:
    """Delete `debris`. Returns the deleted folders."""
    removed = []
    for path in debris(root, name):
        try:
            shutil.rmtree(path)
            removed.append(path)
        except OSError as error:
            log.warning("checkpoint: %s: leftover of a killed save, cannot be deleted (%s).", path, error)
    return removed


def _is_needed(path: Path) -> bool:
    """Whether this is the replaced checkpoint of a replacement that did not complete."""
    return path.name.startswith(_OLD) and not path.with_name(path.name.removeprefix(_OLD)).exists()
