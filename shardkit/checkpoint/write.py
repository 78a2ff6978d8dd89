"""Saving: a checkpoint exists entirely or not at all, and all ranks succeed or all raise the same error.

    opening.py  same step and same state on all ranks; then rank 0 looks for room and makes a temporary folder
    put.py      every rank its own bytes, hashed in the same pass, on disk before it tells so, with its digests
    commit.py   rank 0: manifest, folders to disk, rename, parent folder to disk; every rank learns the outcome;
                LATEST and retention, which can fail without harm

Two agreements in all; two more where ranks hold something differently (`apart`), one more where a state that was saved
a moment ago is asked for again. Nothing here is ever written in place: the folder is temporary until it is whole.
"""

import shutil
import time
from collections.abc import Callable

from shardkit.checkpoint import faults, in_store, put
from shardkit.checkpoint.attempt import together
from shardkit.checkpoint.commit import after_commit, commit
from shardkit.checkpoint.layout import Kind
from shardkit.checkpoint.opening import Opening, let_go
from shardkit.checkpoint.save_request import PreparedSave, SaveRequest
from shardkit.checkpoint.state import Captured, Live, capture
from shardkit.distributed.control import ControlGroup, LostRank
from shardkit.errors import CheckpointSaveError
from shardkit.storage.url import Place


def save(live: Live, kind: Kind, request: SaveRequest, control: ControlGroup) -> Place:
    """The committed checkpoint. Collective. CheckpointSaveError on every rank where it failed on one."""
    prepared = prepare(live, kind, request, control)
    return request.final if prepared is None else finish(prepared, control)


def prepare(live: Live, kind: Kind, request: SaveRequest, control: ControlGroup) -> PreparedSave | None:
    """A save ready to be written: everything checked, the temporary folder made. Collective.

    None where `request.unless_equal` and the checkpoint that is there holds this very state.
    """
    return ready(lambda: capture(live, kind, control.rank, control.world_size), request, control)


def ready(take: Callable[[], Captured], request: SaveRequest, control: ControlGroup) -> PreparedSave | None:
    """As `prepare`, of the state that `take` captures. Collective."""
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
    """Write, agree, commit. Collective. The state itself is not touched: this may run beside training."""
    request, started = prepared.request, time.monotonic()
    is_everybody_done = False
    try:
        together(
            control,
            request,
            "write",
            lambda: put.write_all(prepared, control),
            answer=lambda written: written,
            judge=lambda answers: commit(prepared, answers),
        )
        if control.rank != 0:
            faults.reach("agree-2", control.rank)
    except CheckpointSaveError as error:
        is_everybody_done = not isinstance(error.__cause__, LostRank)
        raise
    finally:
        let_go(prepared.hold)
        if request.staging is not None:
            request.staging.discard()
        if prepared.record is not None:
            after_commit(prepared, prepared.record, started)
        elif prepared.attempt is not None:
            in_store.abandon(prepared.attempt, is_everybody_done)
        elif control.rank == 0:
            shutil.rmtree(str(prepared.temporary), ignore_errors=True)
    return request.final
