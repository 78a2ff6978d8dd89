"""Work between two optimizer steps and at the start and end of a run: stopping on a signal, resuming, shutting down.

A step boundary is the point where the loop requests its next batch after a step: scheduler and zero_grad of that step
are done, and the loader's position matches the step, so that a state saved here resumes exactly.
"""

import gc
from contextlib import suppress
from functools import partial
from weakref import WeakSet

from shardkit import env
from shardkit.checkpoint.files import folder
from shardkit.distributed import accelerators, progress
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.distributed.collectives import wait_for_everyone
from shardkit.distributed.process import has_started_group, leave
from shardkit.errors import Preempted, ShardkitError, UsageError
from shardkit.log import get_logger
from shardkit.runtime import measure
from shardkit.runtime.likely_mistakes import learning_rates
from shardkit.runtime.likely_mistakes.same_modules import noticed_late
from shardkit.runtime.project import series_of
from shardkit.runtime.run import Run
from shardkit.runtime.steps import preemption
from shardkit.storage.url import Place

log = get_logger(__name__)

_watches: WeakSet[BackgroundAgreement] = WeakSet()
"""Those of the runs that are not over."""


def watch(run: Run) -> None:
    """Makes every step boundary check for a stop signal (of a launched run), and for ranks that used different
    modules or learning rates."""
    if env.resolved_config_path() is not None:
        preemption.install()
        run.events.on_missed_boundary = partial(_warn_without_boundaries, run)
    run.watch = BackgroundAgreement(preemption.is_requested_here, noticed_late, learning_rates.warn)
    _watches.add(run.watch)
    run.events.at_boundary = partial(pass_boundary, run)


def pass_boundary(run: Run) -> None:
    """Returns where no rank got a stop signal; else saves and raises Preempted, on all ranks at the same boundary."""
    _warn_unless_resumed(run)
    assert run.watch is not None
    if not run.watch.pass_boundary(run.same_modules.trace(), learning_rates.as_number(run.optimizers)):
        return
    from shardkit.runtime.checkpoints import saving

    step = run.counters.step
    place = saving.save_state(run, blocking=True) if names_checkpoints(run) else None
    saving.close(run)  # releases the lock before this run ends: the next run may start at once
    if place is not None:
        raise Preempted(
            f"launch: stopped by a signal after step {step}; saved in {place}, --resume auto continues from it."
        )
    raise Preempted(
        f"launch: stopped by a signal after step {step}; nothing was saved, because the script sets no "
        f"{_missing_of_project(run)}: "
        "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
    )


def _warn_without_boundaries(run: Run) -> None:
    """Warns once of a loop that a stop signal cannot end: at once if its checkpoints have a folder, else at the
    signal."""
    if not (names_checkpoints(run) or preemption.is_requested_here()):
        return
    run.events.on_missed_boundary = lambda: None
    if run.process.is_main:
        log.warning(
            "stop signals: this loop cannot save and stop at one (got steps without a prepared loader, accumulate() or "
            "accelerator.backward(), which show where a step ends); call accelerator.backward(loss) in place of "
            "loss.backward()."
        )


def _warn_unless_resumed(run: Run) -> None:
    """Warns once where the launch has --resume, but the script never calls resume()."""
    wanted = run.config.shardkit.checkpoint.resume
    if wanted != "never" and not run.is_resumed:
        run.is_resumed = True
        if run.process.is_main:
            log.warning(
                "checkpoint.resume: nothing was resumed (got %s), and this run trains from the start; "
                "call accelerator.resume() after prepare.",
                wanted,
            )


def names_checkpoints(run: Run) -> bool:
    """Whether save_state() needs no folder argument."""
    return series_of(run.project) is not None


def _missing_of_project(run: Run) -> str:
    """What a script without `names_checkpoints` does not set."""
    return "project folder" if run.project.project_dir is None else "automatic_checkpoint_naming"


def resume(run: Run, data_position: bool = True, strict: bool = True) -> bool:
    """Restores the checkpoint that the configuration selects; returns whether it did. Collective."""
    wanted = run.config.shardkit.checkpoint.resume
    if wanted == "never":
        _warn_of_what_is_there(run)
        return False
    from shardkit.runtime.checkpoints import loading, saving

    if wanted != "auto":
        loading.load_state(run, wanted, data_position=data_position, strict=strict)
        return True
    if not names_checkpoints(run):
        raise UsageError(
            f"resume: auto needs a project folder to look in (got no {_missing_of_project(run)}); give Accelerator a "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), or name a checkpoint."
        )
    found = loading.resume(run, data_position, strict)
    if not found and run.process.is_main:
        _tell_of_the_start(saving.root_of(run))
    return found


def _warn_of_what_is_there(run: Run) -> None:
    """On rank 0, of a run that does not resume: a warning where its folder has checkpoints, which its own replace."""
    if not run.process.is_main or not names_checkpoints(run):
        return
    from shardkit.runtime.checkpoints import saving

    with suppress(ShardkitError, OSError):
        found = folder.steps(saving.root_of(run))
        attempt = env.get("TORCHELASTIC_RESTART_COUNT")
        if found and attempt not in (None, "", "0"):
            log.warning(
                "checkpoint.resume: this is a restart (TORCHELASTIC_RESTART_COUNT=%s) that trains from the start, "
                "though there is %s; set shardkit.checkpoint.resume: auto, with which it goes on from there.",
                *(attempt, found[0].path),
            )
        elif found:
            log.warning(
                "checkpoint.resume: this run trains from the start, though there is %s, and its checkpoints will take "
                "the place of those; go on from there with --resume auto, or save to another folder.",
                found[0].path,
            )


def _tell_of_the_start(root: Place) -> None:
    """On rank 0: no checkpoint is there to resume from; a warning where the project folder itself holds some."""
    start = f"checkpoint.resume: no checkpoint yet in {root}; this run trains from the start."
    with suppress(ShardkitError, OSError):
        if beside := folder.steps(root.parent):
            log.warning("%s It does not look at %s: move it there, or name it with --resume.", start, beside[0].path)
            return
    log.info(start)


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
    return not _watches


def _end_together(run: Run) -> None:
    from shardkit.runtime.checkpoints import saving

    session = run.saving
    saving.close(run)  # counts a save in flight
    saved = session.last_step if session is not None else None
    if saved is not None and saved < run.counters.step and run.process.is_main:
        log.warning(
            "checkpoint: the run ends at step %d, but its newest checkpoint is of step %d; call save_state() after "
            "the loop to save the last steps.",
            run.counters.step,
            saved,
        )
    wait_for_everyone()
    if run.watch is not None:
        _watches.discard(run.watch)
        run.watch.close()  # not earlier: a slower rank may still wait at a boundary for all answers
    if measure.is_asked_for():
        measure.report(run)
    progress.leave("done", run.counters.step)


def collect_garbage() -> None:
    """Frees unreferenced memory, also on the device."""
    gc.collect()
    accelerators.empty_cache()
