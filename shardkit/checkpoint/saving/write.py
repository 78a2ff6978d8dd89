"""Saving: a checkpoint is written completely or not at all, and all ranks succeed or all raise the same error.

    opening.py  all ranks check that step and state are the same; then rank 0 checks the free space and makes a
                temporary folder
    put.py      every rank writes and hashes its bytes in one pass; they are durable before it reports its digests
    commit.py   rank 0: manifest, fsync of the folders, rename, fsync of the parent folder; every rank gets the outcome;
                then LATEST and retention, whose errors are only warnings

This takes two agreements; two more if state differs between ranks, three if weights do, one more with `unless_equal`.
Existing checkpoints are never modified: files are written into a temporary folder until it is complete.
"""

import os
import shutil
import time
from collections.abc import Callable

from shardkit.checkpoint import faults
from shardkit.checkpoint.files.layout import Kind
from shardkit.checkpoint.saving import in_store, put
from shardkit.checkpoint.saving.attempt import together
from shardkit.checkpoint.saving.commit import after_commit, commit
from shardkit.checkpoint.saving.opening import Opening
from shardkit.checkpoint.saving.save_request import PreparedSave, SaveRequest
from shardkit.checkpoint.states.state import Captured, Live, capture
from shardkit.distributed.control import ControlGroup, LostRank
from shardkit.errors import CheckpointSaveError
from shardkit.storage.url import Place


def save(live: Live, kind: Kind, request: SaveRequest, control: ControlGroup) -> Place:
    """Save, and return the committed checkpoint. Collective. If it fails on one rank, all raise CheckpointSaveError."""
    prepared = prepare(live, kind, request, control)
    return request.final if prepared is None else finish(prepared, control)


def prepare(live: Live, kind: Kind, request: SaveRequest, control: ControlGroup) -> PreparedSave | None:
    """A save ready to be written: everything checked, the temporary folder made. Collective.

    None if `request.unless_equal` is set and the existing checkpoint has the same contents.
    """
    return ready(lambda: capture(live, kind, control.rank, control.world_size), request, control)


def ready(take: Callable[[], Captured], request: SaveRequest, control: ControlGroup) -> PreparedSave | None:
    """As `prepare`, with the state that `take` returns. Collective."""
    opening = Opening(request, control)
    try:
        opening.capture(take)
        if not opening.is_alike:
            opening.keep_apart()
        if not opening.is_begun:
            opening.begin_unless_saved()
    except CheckpointSaveError:
        opening.discard()
        raise
    return opening.prepared() if opening.is_begun else None


def finish(prepared: PreparedSave, control: ControlGroup) -> Place:
    """Write, agree, commit. Collective. Does not modify the live state, so it may run in the background."""
    request, started = prepared.request, time.monotonic()
    is_everybody_done = False
    try:
        together(
            control,
            request,
            "write",
            lambda: put.write_all(prepared, control),
            answer=lambda written: (written, prepared.nan),
            judge=lambda answers: commit(prepared, answers),
        )
        if control.rank != 0:
            faults.reach("agree-2", control.rank)
    except CheckpointSaveError as error:
        is_everybody_done = not isinstance(error.__cause__, LostRank)
        raise
    finally:
        if prepared.hold is not None:
            os.close(prepared.hold)
        if request.staging is not None:
            request.staging.discard()
        if prepared.record is not None:
            after_commit(prepared, prepared.record, started)
        elif prepared.attempt is not None:
            in_store.abandon(prepared.attempt, is_everybody_done)
        elif control.rank == 0:
            shutil.rmtree(str(prepared.temporary), ignore_errors=True)
    return request.final
