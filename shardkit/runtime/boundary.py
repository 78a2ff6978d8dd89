"""What happens between two optimizer steps and at the ends of a run: stopping when told to, resuming, leaving.

A boundary is where the loop comes back to its loader after a step: scheduler and zero_grad of that step are done, and
the loader's position is that of the step, so a state saved here continues exactly.
"""

import gc
from functools import partial
from typing import TYPE_CHECKING

import torch

from shardkit import env
from shardkit.distributed import progress
from shardkit.distributed.collectives import wait_for_everyone
from shardkit.distributed.process import leave
from shardkit.distributed.watch import Watch
from shardkit.errors import Preempted, UsageError
from shardkit.log import get_logger
from shardkit.runtime import measure, preemption
from shardkit.runtime.same_modules import noticed_late

if TYPE_CHECKING:
    from shardkit.runtime.accelerator import Accelerator

log = get_logger(__name__)


def watch(accelerator: "Accelerator") -> None:
    """From now on every boundary of this accelerator looks whether the run was told to stop, where it was launched, and
    whether ranks have used different modules."""
    if env.resolved_config_path() is not None:
        preemption.install()
    if accelerator.watch is None:
        accelerator.watch = Watch(preemption.is_requested_here, noticed_late)
    accelerator.accumulation.at_boundary = partial(pass_boundary, accelerator)


def pass_boundary(accelerator: "Accelerator") -> None:
    """Returns where no rank was told to stop; else saves and raises Preempted, on all ranks at the same boundary."""
    _warn_unless_resumed(accelerator)
    assert accelerator.watch is not None
    if not accelerator.watch.pass_boundary(accelerator.same_modules.trace()):
        return
    from shardkit.runtime import saving

    step = accelerator.counters.step
    folder = accelerator.save_state(blocking=True) if names_checkpoints(accelerator) else None
    saving.close(accelerator)  # the folder is free before this run is gone: its successor may start at once
    if folder is not None:
        raise Preempted(f"launch: told to stop after step {step}; saved in {folder}, --resume auto goes on from it.")
    raise Preempted(
        f"launch: told to stop after step {step}; nothing was saved, because the script names no project folder: "
        "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
    )


def _warn_unless_resumed(accelerator: "Accelerator") -> None:
    """Once: a launch that was to resume, of a script that does not, trains from the start."""
    wanted = accelerator.config.shardkit.checkpoint.resume
    if wanted != "never" and not accelerator.is_resumed:
        accelerator.is_resumed = True
        if accelerator.is_main_process:
            log.warning(
                "checkpoint.resume: nothing was resumed (got %s), and this run trains from the start; "
                "call accelerator.resume() after prepare.",
                wanted,
            )


def names_checkpoints(accelerator: "Accelerator") -> bool:
    """Whether save_state() knows by itself where to."""
    return bool(accelerator.project.project_dir) and accelerator.project.automatic_checkpoint_naming


def resume(accelerator: "Accelerator") -> bool:
    """Restores what the configuration names, and whether it did. Collective."""
    wanted = accelerator.config.shardkit.checkpoint.resume
    if wanted == "never":
        return False
    if wanted != "auto":
        accelerator.load_state(wanted)
        return True
    if not names_checkpoints(accelerator):
        raise UsageError(
            "resume: auto needs a project folder to look in (got none); give Accelerator a "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), or name a checkpoint."
        )
    from shardkit.runtime import saving

    return saving.resume(accelerator)


def end(accelerator: "Accelerator") -> None:
    """Waits for a save in flight and for all ranks, then leaves the process group that this run started. Collective."""
    from shardkit.runtime import saving

    saving.close(accelerator)
    wait_for_everyone()
    if accelerator.watch is not None:
        accelerator.watch.close()  # not before: a rank that is behind may wait at a boundary for all to answer
    if measure.is_asked_for():
        measure.report(accelerator, accelerator.started_bytes)
    progress.pause("done", accelerator.counters.step)
    if accelerator.process.owns_group:
        leave()


def collect_garbage() -> None:
    """Gives back memory that nothing refers to, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
