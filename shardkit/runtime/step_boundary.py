"""What happens between two optimizer steps and at the ends of a run: stopping when told to, resuming, leaving.

A boundary is where the loop comes back to its loader after a step: scheduler and zero_grad of that step are done, and
the loader's position is that of the step, so a state saved here continues exactly.
"""

import gc
from functools import partial

from shardkit import env
from shardkit.distributed import accelerators, progress
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.distributed.collectives import wait_for_everyone
from shardkit.distributed.process import leave
from shardkit.errors import Preempted, UsageError
from shardkit.log import get_logger
from shardkit.runtime import measure, preemption
from shardkit.runtime.run import Run
from shardkit.runtime.same_modules import noticed_late

log = get_logger(__name__)


def watch(run: Run) -> None:
    """From now on every boundary of the run looks whether the run was told to stop, where it was launched, and
    whether ranks have used different modules."""
    if env.resolved_config_path() is not None:
        preemption.install()
    if run.watch is None:
        run.watch = BackgroundAgreement(preemption.is_requested_here, noticed_late)
    run.accumulation.at_boundary = partial(pass_boundary, run)


def pass_boundary(run: Run) -> None:
    """Returns where no rank was told to stop; else saves and raises Preempted, on all ranks at the same boundary."""
    _warn_unless_resumed(run)
    assert run.watch is not None
    if not run.watch.pass_boundary(run.same_modules.trace()):
        return
    from shardkit.runtime import saving

    step = run.counters.step
    folder = saving.save_state(run, blocking=True) if names_checkpoints(run) else None
    saving.close(run)  # the folder is free before this run is gone: its successor may start at once
    if folder is not None:
        raise Preempted(f"launch: told to stop after step {step}; saved in {folder}, --resume auto goes on from it.")
    raise Preempted(
        f"launch: told to stop after step {step}; nothing was saved, because the script names no project folder: "
        "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
    )


def _warn_unless_resumed(run: Run) -> None:
    """Once: a launch that was to resume, of a script that does not, trains from the start."""
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
    """Whether save_state() knows by itself where to."""
    return bool(run.project.project_dir) and run.project.automatic_checkpoint_naming


def resume(run: Run) -> bool:
    """Restores what the configuration names, and whether it did. Collective."""
    wanted = run.config.shardkit.checkpoint.resume
    if wanted == "never":
        return False
    from shardkit.runtime import saving

    if wanted != "auto":
        saving.load_state(run, wanted)
        return True
    if not names_checkpoints(run):
        raise UsageError(
            "resume: auto needs a project folder to look in (got none); give Accelerator a "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), or name a checkpoint."
        )
    found = saving.resume(run)
    if not found and run.process.is_main:
        log.info("checkpoint.resume: no checkpoint yet in %s; this run trains from the start.", saving.root_of(run))
    return found


def end(run: Run) -> None:
    """Waits for a save in flight and for all ranks, then leaves the process group that this run started. Collective."""
    from shardkit.runtime import saving

    run.trackers.finish()
    session = run.saving
    saving.close(run)  # a save in flight counts
    saved = session.last_step if session is not None else None
    if saved is not None and saved < run.counters.step and run.process.is_main:
        log.warning(
            "checkpoint: the run ends at step %d, and the newest it has saved is step %d; call save_state() after the "
            "loop to keep the last steps too.",
            run.counters.step,
            saved,
        )
    wait_for_everyone()
    if run.watch is not None:
        run.watch.close()  # not before: a rank that is behind may wait at a boundary for all to answer
    if measure.is_asked_for():
        measure.report(run, run.started_bytes)
    progress.leave("done", run.counters.step)
    if run.process.owns_group:
        leave()


def collect_garbage() -> None:
    """Gives back memory that nothing refers to, on the device too."""
    gc.collect()
    accelerators.empty_cache()
