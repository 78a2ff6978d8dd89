"""Resuming: which checkpoint a run begins with, and what is told where it begins with none. A run that begins with none
may never save: what reads and writes checkpoints is imported where it is used."""

from contextlib import suppress

from shardkit import env
from shardkit.checkpoint.files import folder
from shardkit.errors import ShardkitError, UsageError
from shardkit.log import get_logger
from shardkit.runtime.project import missing_for_series
from shardkit.runtime.run import Run
from shardkit.storage.url import Place

log = get_logger(__name__)


def resume(run: Run, data_position: bool, strict: bool) -> bool:
    """Restores the checkpoint that the configuration selects; returns whether it did. Collective."""
    wanted = run.config.shardkit.checkpoint.resume
    if wanted == "never":
        _warn_of_what_is_there(run)
        return False
    from shardkit.runtime.checkpoints import loading, saving

    if wanted != "auto":
        loading.load_state(run, wanted, data_position=data_position, strict=strict)
        return True
    if missing := missing_for_series(run.project):
        raise UsageError(
            f"resume: auto needs a project folder to look in (got no {missing}); give Accelerator a "
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True), or name a checkpoint."
        )
    found = loading.load_newest(run, "resume", data_position, strict)
    if found is None and run.process.is_main:
        _tell_of_the_start(saving.root_of(run))
    return found is not None


def _warn_of_what_is_there(run: Run) -> None:
    """On rank 0, of a run that does not resume: a warning where its folder has checkpoints, which its own replace."""
    if not run.process.is_main or missing_for_series(run.project):
        return
    from shardkit.runtime.checkpoints import saving

    with suppress(ShardkitError, OSError):
        saving.note_series(run)
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
