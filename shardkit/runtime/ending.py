"""The end of a run: `accelerator.end_training()`."""

import gc

from shardkit.distributed import progress
from shardkit.distributed.collectives import wait_for_everyone
from shardkit.distributed.process import has_started_group, leave
from shardkit.log import get_logger
from shardkit.runtime import measure
from shardkit.runtime.run import Run
from shardkit.runtime.steps import preemption, step_boundary

log = get_logger(__name__)


def end(run: Run) -> None:
    """Waits for a save in flight and for all ranks, finishes the trackers, then destroys the process group that this
    run started, or that no other run needs any more. Collective."""
    try:
        _end_together(run)
    finally:
        run.trackers.finish()  # they may upload for long, or fail: no rank waits for another any more
    is_last = _is_last()
    if run.process.owns_group or (has_started_group() and is_last):
        leave()
    if is_last:
        preemption.leave_ctrl_c()


def _is_last() -> bool:
    """Whether all other runs of this process are over: ended, refused when they began, or dropped by the script, as
    where a cell of a notebook is run again."""
    gc.collect()
    return not step_boundary.is_any_watched()


def _end_together(run: Run) -> None:
    from shardkit.runtime.checkpoints import saving  # not before: a script may never save

    session = run.saving
    saving.close(run)  # counts a save in flight
    saved = session.last_step if session is not None else None
    if saved is not None and saved < run.counters.step and run.process.is_main:
        log.warning(
            "checkpoint: the run ends at step %d, but the newest checkpoint for --resume auto is of step %d; call "
            "save_state() after the loop to save the last steps.",
            run.counters.step,
            saved,
        )
    wait_for_everyone()
    step_boundary.unwatch(run)
    if measure.is_asked_for():
        measure.report(run)
    progress.leave("done", run.counters.step)
