"""Finds the checkpoint for a path: a project folder, a folder of checkpoints, or a checkpoint."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.files.verify import Checkpoint, open_checkpoint
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage.url import Place, Url

# The folder in a project in which Accelerator(project_config=...) saves step folders.
SERIES = "checkpoints"

log = get_logger(__name__)


def series(path: Place) -> Place:
    """The folder of step folders: the `checkpoints` of a path, where a run looks, or the path itself."""
    root, steps = _steps_in(path)
    if not steps:
        raise _none_at(path, _named_otherwise(path))
    return root


def _steps_in(path: Place) -> tuple[Place, list[folder.FoundCheckpoint]]:
    """A path's `checkpoints` or the path, whichever has step folders, and these, newest first; the path if none has."""
    return next(((root, steps) for root, steps in _both(path) if steps), (path, []))


def _both(path: Place) -> list[tuple[Place, list[folder.FoundCheckpoint]]]:
    own = folder.steps(path)  # first: where the path cannot be read, the error names it
    return [(path / SERIES, folder.steps(path / SERIES)), (path, own)]


def to_add_to(path: Path) -> Path:
    """The folder of step folders, for one more: the `checkpoints` of a path without own ones, where there is one."""
    return path / SERIES if (path / SERIES).is_dir() and not folder.steps(path) else path


def _named_otherwise(path: Place) -> list[Place]:
    """Checkpoints in a path and its `checkpoints` that are not named by step."""
    return [*folder.named_otherwise(path / SERIES), *folder.named_otherwise(path)]


def _none_at(path: Place, others: list[Place]) -> CheckpointError:
    """Why a path is not a folder of step folders; `others` are the checkpoints in it that are not named by step."""
    if _is_checkpoint(path):
        what = "is a single checkpoint; give the folder that contains the checkpoints of a run"
    elif not disk.is_there(path):
        what = "no such folder; give a project folder or a folder of checkpoints"
    elif around := _checkpoint_of_part(path):
        what = f"is part of the checkpoint {around}; give that folder"
    elif not isinstance(path, Url) and path.is_file():
        what = "is a file; give a project folder or a folder of checkpoints"
    elif manifest.is_to_convert(path):
        what = manifest.TO_CONVERT
    elif others:
        what = f"its checkpoints are not named by step ({', '.join(other.name for other in others)}); give one of them"
    else:
        what = f"contains no step-* folder, and neither does its folder {SERIES}; give the folder of a run"
        what += f", such as {', '.join(runs)}" if (runs := _runs_in(path)) else ""
    return CheckpointError(f"checkpoint: {path}: {what}.")


def _checkpoint_of_part(path: Place) -> Path | None:
    """The checkpoint of which this is a file or a folder; None where it is of none."""
    if isinstance(path, Url):
        return None
    above = (path if path.name else path.absolute()).parents  # `.` has none
    return next((folder for folder in above[:2] if _is_checkpoint(folder)), None)


def _runs_in(path: Place, most: int = 3) -> list[str]:
    """Some project folders in this one, or in its folders: `runs/gpt`."""
    if isinstance(path, Url):
        return []
    found: set[Path] = set()
    with suppress(OSError):  # a folder that another process deletes meanwhile
        for pattern in (f"*/{SERIES}/step-*", f"*/*/{SERIES}/step-*"):
            found |= {step.parents[1] for step in path.glob(pattern)}
    return [str(run) for run in sorted(found)[:most]]


def _with_name(path: Place) -> Place:
    """The path; the full one of a checkpoint without a name, as in `.` or `..`: files beside a checkpoint are found
    by its name, also one that a crash left under another name."""
    if isinstance(path, Url):
        return path
    if path.name not in ("", ".."):
        folder.heal(path)
        return path
    full = path.resolve()
    return full if _is_checkpoint(full) else path


def _is_checkpoint(path: Place) -> bool:
    if isinstance(path, Url):
        return manifest.is_checkpoint(path)
    if folder.STEP.fullmatch(path.name) and os.path.isdir(path):
        return True
    # os.path instead of Path.exists: no PermissionError here; opening the file reports it.
    return os.path.exists(path / manifest.NAME) and not manifest.is_of_another_program(path)


def checkpoint(path: Place) -> Checkpoint:
    """The checkpoint at a path, or the newest complete one in a folder, with a warning of newer ones that are not.
    Raises CheckpointError with the reason."""
    with _as_checkpoint_error(path):
        path = _with_name(path)
        if _is_checkpoint(path):
            return open_checkpoint(path)
        root = series(path)
        found, skipped = folder.newest_valid(root)
        if found is None:
            raise CheckpointError(f"{root}: none of its {len(skipped)} checkpoints is complete: {skipped[0].reason}")
        for newer in skipped:
            if not isinstance(newer.path, Url) and not os.path.lexists(newer.path):
                continue  # a run has deleted it meanwhile
            log.warning("checkpoint: skipped step %d (%s); step %d is used.", newer.step, newer.reason, found.step)
        return open_checkpoint(found.path)


def checkpoints(path: Place) -> list[Place]:
    """The checkpoint at a path, or all in a folder and its `checkpoints`: those named by step, oldest first, then
    others."""
    with _as_checkpoint_error(path):
        path = _with_name(path)
        if _is_checkpoint(path):
            return [path]
        named = [one.path for _, steps in _both(path) for one in reversed(steps)]
        found = [*named, *_named_otherwise(path)]
        if not found:
            raise _none_at(path, [])
        return found


def refusal_of_place(path: Place) -> str | None:
    """Why a path from which one state is to be loaded is none: a folder of checkpoints, the project folder around it,
    or a part of a checkpoint; None for any other."""
    if manifest.exists(path):
        return None
    if around := _checkpoint_of_part(path):
        return f"a part of a checkpoint; name the checkpoint, {around}"
    newest = [one.path for one in _steps_in(path)[1]][:1] or folder.named_otherwise(path)[-1:]
    return f"a folder of checkpoints; name one of them, such as {newest[0]}" if newest else None


@contextmanager
def _as_checkpoint_error(path: Place) -> Iterator[None]:
    """Turns errors of the file system or the store into CheckpointError, and adds the prefix `checkpoint: `."""
    try:
        yield
    except OSError as error:
        raise folder.unreadable(path, error) from error
    except CheckpointError as error:
        text = str(error)
        raise type(error)(text if text.startswith("checkpoint: ") else f"checkpoint: {text}") from None
