"""A save into a store of objects, which has no folders, no rename and no locks.

    <root>/.tmp-<name>-<save_id>       the mark of a save: rank 0 writes it first, and deletes it last
    <root>/<name>/<save_id>/...        the files of that save; without meaning until
    <root>/<name>/MANIFEST.json        is written: only where there is none, or over the one that was there before

The store decides between two saves of one name, since it does not write a manifest whose condition does not hold.
What a dead save has left is deleted once it is certainly dead: a save gives up by itself long before that.
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from shardkit.checkpoint import disk, folder, manifest
from shardkit.checkpoint.manifest import Manifest
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.log import get_logger
from shardkit.storage import objects
from shardkit.storage.objects import Seen
from shardkit.storage.url import Url

if TYPE_CHECKING:
    from shardkit.checkpoint.save_request import SaveRequest

# A save that has taken so long commits no more. Both times are measured on one clock each: the process's; the store's.
SAVE_LIMIT_S = 12 * 3600.0
DEAD_AFTER_S = 24 * 3600.0
_MARK = re.compile(r"\.tmp-(?P<name>.+)-(?P<save_id>[0-9a-f]{32})")

logger = get_logger(__name__)


@dataclass
class Attempt:
    """A save under way, on rank 0."""

    final: Url
    save_id: str
    mark: Url
    before: Seen | None
    """The manifest that it replaces."""
    replaced: Url | None
    """Where the files of that one are."""
    begun_s: float = field(default_factory=time.monotonic)
    is_unknown: bool = False
    """Whether nobody knows if it is committed: then nothing of it is deleted here."""


def files_of(final: Url, save_id: str) -> Url:
    """Where the files of a save go."""
    return final / save_id


def begin(request: "SaveRequest") -> Attempt:
    """On rank 0: leave a mark, and clean up after the dead. FileExistsError where the name is taken."""
    final, root = request.final, request.final.parent
    assert isinstance(final, Url) and isinstance(root, Url)
    if not objects.is_exclusive(root):
        _warn_of_no_condition(root)
    before = objects.look(final / manifest.NAME)
    _refuse_taken(request, final, before)
    mark = folder.temporary_folder(final, request.save_id)
    host = {"run_id": request.run_id, "host": socket.gethostname(), "pid": os.getpid(), "step": request.step}
    objects.put(mark, disk.to_json(host))
    attempt = Attempt(final, request.save_id, mark, before, _replaced(final) if before else None)
    collect(root, None if request.in_series else final.name, mark)
    return attempt


@lru_cache(maxsize=16)
def _warn_of_no_condition(root: Url) -> None:
    logger.warning(
        "checkpoint: %s: %s:// has no PUT that may only create; of two runs that save one step in the same moment, "
        "both would believe that theirs is there. Let one run save here.",
        root,
        root.scheme,
    )


def _refuse_taken(request: "SaveRequest", final: Url, before: Seen | None) -> None:
    if before is not None and not request.replace:
        raise FileExistsError(17, "a checkpoint of this name exists, and is never written again", str(final))
    if before is None:
        others = [name for name in objects.names(final) if not manifest.DATA.fullmatch(name)]
        if others or objects.look(final) is not None:
            there = f"other things in it ({others[0]})" if others else "an object"
            raise FileExistsError(17, f"{there}; give another name", str(final))


def _replaced(final: Url) -> Url | None:
    try:
        return _files_there(final)
    except CheckpointError:  # damaged: its files are not known
        return None


def _files_there(final: Url) -> Url | None:
    """Where the files of the checkpoint of this name are; None where there is none, or has no folder for them."""
    data = manifest.read(final).data if manifest.is_here(final) else None
    return None if data is None else final / data


def commit(attempt: Attempt, record: Manifest) -> None:
    """On rank 0: write the manifest, unless somebody else has written one since the beginning."""
    if time.monotonic() - attempt.begun_s > SAVE_LIMIT_S:
        raise CheckpointError(f"it took more than {SAVE_LIMIT_S / 3600:.0f} hours, and counts as dead by now")
    target, data = attempt.final / manifest.NAME, manifest.to_bytes(record)
    try:
        if attempt.before is None:
            objects.put_new(target, data)
        else:
            objects.put_over(target, data, attempt.before)
    except FileExistsError as error:
        raise CheckpointError(
            f"{_who(attempt.final)} has saved {attempt.final} meanwhile; its checkpoint stays"
        ) from error
    except objects.OutcomeUnknown:
        attempt.is_unknown = True
        raise


def _who(final: Url) -> str:
    try:
        found = manifest.read(final)
    except (CheckpointError, OSError):
        return "another run"
    return f"another run ({found.run_id[:12]}, at {found.created_utc[:19]} UTC)"


def tidy(attempt: Attempt) -> None:
    """After the commit: delete what was replaced, and the mark."""
    if attempt.replaced is not None:
        objects.remove(attempt.replaced)
    objects.remove(attempt.mark)


def abandon(attempt: Attempt, is_everybody_done: bool) -> None:
    """Delete what a failed save has written. The mark stays where a rank may write on: then a later save cleans up."""
    if attempt.is_unknown:
        logger.warning("checkpoint: %s: its files stay, since nobody knows whether it is committed.", attempt.final)
        return
    try:
        objects.remove(files_of(attempt.final, attempt.save_id))
        if is_everybody_done:
            objects.remove(attempt.mark)
    except OSError as error:
        logger.warning("checkpoint: what a failed save left is not deleted yet (%s).", error)


def wait_until_marked(final: Url, save_id: str, wait_s: float) -> None:
    """Until the mark is seen here; CheckpointError where the store is not one that all ranks share."""
    mark, deadline = folder.temporary_folder(final, save_id), time.monotonic() + wait_s
    while objects.look(mark) is None:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{final.parent} is not storage that all ranks share: rank 0 wrote an object, not seen here"
            )
        time.sleep(0.2)


# ---- what the dead have left ----


def dead(root: Url, name: str | None, now: Url) -> list[tuple[Url, Url]]:
    """(mark, files) of saves that are certainly dead, of one checkpoint or of all steps; `now` was just written."""
    found = []
    for listed in objects.names(root):
        match = _MARK.fullmatch(listed)
        if match is None or root / listed == now:
            continue
        if match["name"] != name and (name or not folder.STEP.fullmatch(match["name"])):
            continue
        try:
            age_s = (objects.modified(now) - objects.modified(root / listed)).total_seconds()
        except OSError as error:
            logger.debug("checkpoint: %s: its age is not known (%s).", root / listed, error)
            continue
        if age_s > DEAD_AFTER_S:
            found.append((root / listed, files_of(root / match["name"], match["save_id"])))
    return found


@contextmanager
def now(root: Url) -> Iterator[Url]:
    """An object that has just been written, whose time is the store's own."""
    mark = root / f".tmp-now-{uuid.uuid4().hex}"
    objects.put(mark, b"{}")
    try:
        yield mark
    finally:
        objects.remove(mark)


def collect(root: Url, name: str | None, now: Url) -> list[Url]:
    """Delete what dead saves have left; their files. What was committed after all stays. Trouble is a warning."""
    removed = []
    try:
        for mark, files in dead(root, name, now):
            if _files_there(files.parent) != files:
                objects.remove(files)
                removed.append(files)
            objects.remove(mark)
    except (CheckpointError, OSError) as error:
        logger.warning("checkpoint: what dead saves have left is not deleted yet (%s).", error)
    return removed


def remove(final: Url) -> None:
    """Delete a checkpoint: from the moment on in which the manifest is gone, there is none. A mark outlives a crash."""
    files = _files_there(final)
    if files is None:
        objects.remove(final)
        return
    mark = folder.temporary_folder(final, files.name)
    objects.put(mark, b"{}")
    objects.remove(final / manifest.NAME)
    objects.remove(files)
    objects.remove(mark)


# ---- one run a folder ----


@dataclass
class Claim:
    """What was there when a run began to save into a folder of checkpoints; another run's is noticed by it."""

    root: Url
    known: set[str]


def claim(root: Url, run_id: str, before: Claim | None) -> Claim:
    """On rank 0, before a save: CheckpointSaveError where another run has saved here since this one began to.

    A store has no locks, so two runs in one folder are noticed when the second one has committed, and not before.
    """
    is_first = before is None or before.root != root
    known: set[str] = set() if is_first or before is None else before.known
    for found in folder.steps(root):
        seen = objects.look(found.path / manifest.NAME)  # type: ignore[arg-type]
        if seen is None or (mark := f"{found.path}:{seen.version}") in known:
            continue
        if not is_first:
            try:
                record = manifest.read(found.path)
            except CheckpointError:
                continue
            if record.run_id != run_id:
                raise CheckpointSaveError(
                    f"checkpoint: {root}: another run ({record.run_id[:12]}) saves here, step {record.step} at "
                    f"{record.created_utc[:19]} UTC; use another folder."
                )
        known.add(mark)
    return Claim(root, known)
