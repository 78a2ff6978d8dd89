"""A save into an object store, which has no folders, no rename and no locks.

    <root>/.tmp-<name>-<save_id>       the mark of a save: rank 0 writes it first, and deletes it last
    <root>/<name>/<save_id>/...        the files of that save; not part of a checkpoint until
    <root>/<name>/MANIFEST.json        is written: only if there is none, or to replace the one seen at the start

If two saves use one name, the store decides: its conditional write of the manifest fails for the second one. Objects of
a dead save are deleted after DEAD_AFTER_S; a running save gives up earlier, after SAVE_LIMIT_S.
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

from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.files.manifest import Manifest
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage import objects
from shardkit.storage.objects import Seen
from shardkit.storage.url import Url

if TYPE_CHECKING:
    from shardkit.checkpoint.saving.save_request import SaveRequest

# A save does not commit after SAVE_LIMIT_S (process's clock). A mark older than DEAD_AFTER_S (store's clock)
# belongs to a dead save.
SAVE_LIMIT_S = 12 * 3600.0
DEAD_AFTER_S = 24 * 3600.0
_MARK = re.compile(r"\.tmp-(?P<name>.+)-(?P<save_id>[0-9a-f]{32})")

log = get_logger(__name__)


@dataclass
class StoreSave:
    """A running save, on rank 0."""

    final: Url
    save_id: str
    mark: Url
    before: Seen | None
    """The manifest that it replaces."""
    replaced: Url | None
    """The files of the replaced checkpoint."""
    begun_s: float = field(default_factory=time.monotonic)
    is_unknown: bool = False
    """Whether it is unknown if the save is committed: then its files are not deleted."""


def files_of(final: Url, save_id: str) -> Url:
    """The prefix of the files of a save."""
    return final / save_id


def begin(request: "SaveRequest") -> StoreSave:
    """On rank 0: write the mark, and delete objects of dead saves. Raises FileExistsError if the name is taken."""
    final, root = request.final, request.final.parent
    assert isinstance(final, Url) and isinstance(root, Url)
    if final == root:  # its mark would be an object of another bucket
        raise CheckpointError(f"{final} is a whole bucket; give a folder in it, such as {final / 'checkpoint'}")
    if not objects.is_exclusive(root):
        _warn_of_no_condition(root)
    before = objects.look(final / manifest.NAME)
    _refuse_taken(request, final, before)
    mark = folder.temporary_folder(final, request.save_id)
    host = {"run_id": request.run_id, "host": socket.gethostname(), "pid": os.getpid(), "step": request.step}
    objects.put(mark, disk.to_json(host))
    attempt = StoreSave(final, request.save_id, mark, before, _replaced(final) if before else None)
    collect(root, None if request.in_series else final.name, mark)
    return attempt


@lru_cache(maxsize=16)
def _warn_of_no_condition(root: Url) -> None:
    log.warning(
        "checkpoint: %s: %s:// does not support conditional writes; if two runs save the same step at the same time, "
        "one overwrites the other unnoticed. Use this folder for one run only.",
        root,
        root.scheme,
    )


def _refuse_taken(request: "SaveRequest", final: Url, before: Seen | None) -> None:
    if before is not None and manifest.is_of_another_program(final):
        raise folder.taken(final, f"{manifest.NAME} of another program is there; use another name")
    if before is not None and not request.replace:
        raise folder.taken(final, "a checkpoint with this name exists, and checkpoints are not overwritten")
    if before is None:
        others = [name for name in objects.names(final) if not manifest.DATA.fullmatch(name)]
        if others:
            advice = "use another name, or write those after the save"
            raise folder.taken(final, f"contains other objects ({others[0]}); {advice}")
        if objects.look(final) is not None:
            raise folder.taken(final, "an object with this name exists; use another name")


def _replaced(final: Url) -> Url | None:
    try:
        return _files_there(final)
    except CheckpointError:  # damaged: its files are not known
        return None


def _files_there(final: Url) -> Url | None:
    """The prefix of the files of the checkpoint with this name; None if there is no checkpoint or no prefix."""
    data = manifest.read(final).data if manifest.exists(final) else None
    return None if data is None else final / data


def commit(attempt: StoreSave, record: Manifest) -> None:
    """On rank 0: write the manifest. Raises CheckpointError if another run has written one since `begin`."""
    if time.monotonic() - attempt.begun_s > SAVE_LIMIT_S:
        raise CheckpointError(f"it took more than {SAVE_LIMIT_S / 3600:.0f} hours, the limit for a save into a store")
    target, data = attempt.final / manifest.NAME, manifest.to_bytes(record)
    try:
        if attempt.before is None:
            objects.put_new(target, data)
        else:
            objects.put_over(target, data, attempt.before)
    except FileExistsError as error:
        raise CheckpointError(
            f"{_who(attempt.final)} has saved {attempt.final} meanwhile; its checkpoint was not replaced"
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


def tidy(attempt: StoreSave) -> None:
    """After the commit: delete the files of the replaced checkpoint, and the mark."""
    if attempt.replaced is not None:
        objects.remove(attempt.replaced)
    objects.remove(attempt.mark)


def abandon(attempt: StoreSave, is_everybody_done: bool) -> None:
    """Delete the files of a failed save. If a rank may still be writing, the mark stays, and a later save deletes the
    rest."""
    if attempt.is_unknown:
        log.warning(
            "checkpoint: %s: the files of the failed save are kept, since it is unknown whether it is committed.",
            attempt.final,
        )
        return
    try:
        objects.remove(files_of(attempt.final, attempt.save_id))
        if is_everybody_done:
            objects.remove(attempt.mark)
    except OSError as error:
        log.warning("checkpoint: files of a failed save could not be deleted (%s); a later save retries.", error)


def wait_until_marked(final: Url, save_id: str, wait_s: float) -> None:
    """Wait until this rank sees the mark. Raises CheckpointError after `wait_s`: ranks do not share the store."""
    mark, deadline = folder.temporary_folder(final, save_id), time.monotonic() + wait_s
    while objects.look(mark) is None:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{final.parent} is not shared by all ranks: rank 0 wrote an object that this rank does not see; "
                "give all machines the same endpoint and credentials"
            )
        time.sleep(0.2)


# ---- objects of dead saves ----


def dead(root: Url, name: str | None, now: Url) -> list[tuple[Url, Url]]:
    """(mark, files) of dead saves, of one checkpoint or of all steps. `now`: an object that was written just before, as
    the store's current time."""
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
            log.debug("checkpoint: %s: its age is unknown (%s).", root / listed, error)
            continue
        if age_s > DEAD_AFTER_S:
            found.append((root / listed, files_of(root / match["name"], match["save_id"])))
    return found


@contextmanager
def now(root: Url) -> Iterator[Url]:
    """A new temporary object; its modification time is the current time of the store's clock."""
    mark = root / f".tmp-now-{uuid.uuid4().hex}"
    objects.put(mark, b"{}")
    try:
        yield mark
    finally:
        objects.remove(mark)


def collect(root: Url, name: str | None, now: Url) -> list[Url]:
    """Delete the objects of dead saves, and return the deleted prefixes. Committed files stay. Errors are warnings."""
    removed = []
    try:
        for mark, files in dead(root, name, now):
            if _files_there(files.parent) != files:
                objects.remove(files)
                removed.append(files)
            objects.remove(mark)
    except (CheckpointError, OSError) as error:
        log.warning("checkpoint: files of dead saves could not be deleted (%s); a later save retries.", error)
    return removed


def remove(final: Url) -> None:
    """Delete a checkpoint: first its manifest, then its files. After a crash in between, the mark lets a later save
    delete the rest."""
    files = _files_there(final)
    if files is None:
        objects.remove(final)
        return
    mark = folder.temporary_folder(final, files.name)
    objects.put(mark, b"{}")
    objects.remove(final / manifest.NAME)
    objects.remove(files)
    objects.remove(mark)
