"""What a run does between two steps: stops on a signal, and compares the modules and learning rates of its ranks.

A step boundary is the point where the loop requests its next batch after a step: scheduler and zero_grad of that step
are done, and the loader's position matches the step, so that a state saved here resumes exactly.
"""

from functools import partial
from weakref import WeakSet

from shardkit import env
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.errors import Preempted
from shardkit.log import get_logger
from shardkit.runtime.likely_mistakes import learning_rates, same_batches
from shardkit.runtime.likely_mistakes.same_modules import noticed_late
from shardkit.runtime.project import missing_for_series
from shardkit.runtime.run import Run
from shardkit.runtime.steps import preemption

log = get_logger(__name__)

_watches: WeakSet[BackgroundAgreement] = WeakSet()
"""Those of the runs that are not over."""


def watch(run: Run) -> None:
    """Makes every step boundary check for a stop signal (of a launched run), and for ranks that used different
    modules or learning rates."""
    if env.resolved_config_path() is not None:
        preemption.install()
        run.events.on_missed_boundary = partial(_warn_without_boundaries, run)
    run.watch = BackgroundAgreement(preemption.is_requested_here, noticed_late, learning_rates.warn, same_batches.warn)
    _watches.add(run.watch)
    run.events.at_boundary = partial(pass_boundary, run)


def pass_boundary(run: Run) -> None:
    """Returns where no rank got a stop signal; else saves and raises Preempted, on all ranks at the same boundary."""
    _warn_unless_resumed(run)
    assert run.watch is not None
    rate, at = learning_rates.as_number(run.optimizers), run.accumulation.boundaries.place
    if not run.watch.pass_boundary(run.same_modules.trace(), rate, at):
        return
    from shardkit.runtime.checkpoints import saving

    step = run.counters.step
    missing = missing_for_series(run.project)
    place = None if missing else saving.save_state(run, blocking=True)
    saving.close(run)  # releases the lock before this run ends: the next run may start at once
    if place is not None:
        raise Preempted(
            f"launch: stopped by a signal after step {step}; saved in {place}, --resume auto continues from it."
        )
    raise Preempted(
        f"launch: stopped by a signal after step {step}; nothing was saved, because the script sets no {missing}: "
        "Accelerator(project_config=ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
    )


def _warn_without_boundaries(run: Run) -> None:
    """Warns once of a loop that a stop signal cannot end: at once if its checkpoints have a folder, else at the
    signal."""
    if missing_for_series(run.project) and not preemption.is_requested_here():
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


def unwatch(run: Run) -> None:
    """At the end of a run, when every rank has come to it: a slower one may wait at a boundary for all answers."""
    if run.watch is not None:
        _watches.discard(run.watch)
        run.watch.close()


def is_any_watched() -> bool:
    """Whether a run of this process is not over: neither ended, nor dropped by the script."""
    return bool(_watches)
