"""How a save or a load begins: all ranks have made the call, and none is amid a step."""

import sys
import threading
import uuid

import torch
import torch.distributed as dist
from torch import nn

from shardkit.checkpoint.loading.load_plan import Unfinished
from shardkit.distributed import control, named_barrier, progress
from shardkit.distributed.long_work import LongWork
from shardkit.errors import CheckpointError, CheckpointSaveError, UsageError
from shardkit.log import get_logger
from shardkit.runtime.checkpoints.save_session import SaveSession
from shardkit.runtime.run import Run

log = get_logger(__name__)


def session_of(run: Run) -> SaveSession:
    """This run's session. Collective on first use, and after the process group has changed."""
    group = dist.group.WORLD if dist.is_initialized() else None
    found = run.saving
    if found is None or found.group is not group:
        agreed = control.start(run.config.shardkit.checkpoint.timeout_s)
        unfinished = Unfinished() if found is None else found.unfinished
        found = SaveSession(agreed, agreed.share(uuid.uuid4().hex), group, unfinished=unfinished)
        run.saving = found
    return found


def joint_session(run: Run, call: str, phase: str, error: type[CheckpointError] = CheckpointError) -> SaveSession:
    """The session, after all ranks have made this call; posts the phase to the launcher. Collective.

    Rank 0 logs the progress where it takes more than two seconds. UsageError where the state may be amid a step.
    """
    step = run.counters.step
    run.refuse_if_left(call)
    _refuse_amid_step(run, call)
    progress.post(phase, step)
    named_barrier.meet(call, run.config.shardkit.checkpoint.timeout_s, error)
    session = session_of(run)
    say = log.info if session.control.rank == 0 else None
    session.control.work = LongWork(f"checkpoint: {call}", lambda: progress.post(phase, step), say)
    return session


def _refuse_amid_step(run: Run, call: str) -> None:
    """A state that is saved or loaded meanwhile mixes two steps, and communication of two threads gets mixed up."""
    trains, here = run.accumulation.thread, threading.current_thread()
    if run.accumulation.is_stepping or _interrupts_model(run):
        raise UsageError(
            f"{call}: called while a model or an optimizer is at work (got a call from a signal handler?); call "
            "it between two steps: let a handler set a flag (shardkit launch saves at SIGTERM and SIGUSR1 by itself)."
        )
    if trains is not None and trains is not here and trains.is_alive():
        raise UsageError(
            f"{call}: called on another thread than the one that trains (got {here.name}, {trains.name} trains); call "
            "it there: save_state(blocking=False) trains on while the files are written."
        )


def _interrupts_model(run: Run) -> bool:
    """Whether this call was made inside a backward, or a forward of a prepared model. There a rank may have begun what
    the others have not, and the communication of a save would be taken for that."""
    frame, modules = sys._getframe(), {id(part) for model in run.models for part in model.modules()}
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _BACKWARD or (frame.f_code is _FORWARD and id(frame.f_locals.get("self")) in modules):
            return True
    return False


_BACKWARD, _FORWARD = torch.autograd.backward.__code__, nn.Module._call_impl.__code__


def begin_save(run: Run, call: str) -> SaveSession:
    """The session of a save, after all ranks have made this call. Collective; ModelError or CheckpointSaveError on all
    ranks where the present state is not worth a save."""
    session = joint_session(run, call, "save", CheckpointSaveError)
    run.same_modules.check_before_save()
    _refuse_unfinished(session, call)
    return session


def _refuse_unfinished(session: SaveSession, call: str) -> None:
    if session.unfinished.parts:
        raise CheckpointSaveError(
            f"{call}: the state is incomplete since loading {session.unfinished.path} failed half-way; load a "
            "checkpoint first."
        )


def session_alone(run: Run, call: str) -> SaveSession:
    """The session of a save that rank 0 makes without the others."""
    alone = run.saving_alone or SaveSession(control.ControlGroup(), uuid.uuid4().hex, None)
    if run.saving is not None:
        alone.unfinished, alone.parent = run.saving.unfinished, run.saving.parent
    run.saving_alone = alone
    _refuse_amid_step(run, call)
    _refuse_unfinished(alone, call)
    return alone
