"""load_state of a run: the checkpoint that is named, or the newest."""

from pathlib import Path

from shardkit.checkpoint.files import paths
from shardkit.checkpoint.loading import locate, read
from shardkit.checkpoint.loading.load_plan import LoadOptions
from shardkit.checkpoint.loading.read import LoadedState
from shardkit.checkpoint.saving import claim, nan
from shardkit.distributed import progress
from shardkit.distributed.modules import every_parameter
from shardkit.errors import CheckpointError, CheckpointMissing, UsageError
from shardkit.log import get_logger
from shardkit.runtime import settings
from shardkit.runtime.checkpoints.beginning import joint_session
from shardkit.runtime.checkpoints.save_session import SaveSession
from shardkit.runtime.checkpoints.saving import live_of, note_series, root_of, wait
from shardkit.runtime.run import Run
from shardkit.sharding.ddp import comm_hooks
from shardkit.sharding.gradient_sync import drop_unreduced
from shardkit.storage.url import Place, Url

log = get_logger(__name__)


def load_state(run: Run, path: str | Path | None = None, *, data_position: bool = True, strict: bool = True) -> Place:
    """Loads `path`, else the project's newest valid checkpoint; returns its folder.

    Collective. CheckpointError on all ranks, with the state unchanged, where it is damaged or does not fit;
    CheckpointMissing, also a FileNotFoundError, where no rank finds it.
    """
    if path is None:
        found = load_newest(run, "load_state", data_position, strict)
        if found is None:
            raise CheckpointMissing(f"checkpoint: {root_of(run)}: no checkpoint here yet; call save_state() first.")
        return found
    run.is_resumed = True
    place = paths.named(path, "load_state")
    session = begin_load(run, "load_state")
    session.control.attempt(lambda: note_series(run))  # this load may be from elsewhere
    _refuse_hooks(run, place)
    _refuse_place(place, session)
    options = _options(run, session, data_position, strict)
    return _loaded(run, session, read.load(live_of(run), place, session.control, options))


def load_newest(run: Run, call: str, data_position: bool = True, strict: bool = True) -> Place | None:
    """Loads the project's newest valid checkpoint; returns its folder, None where none was ever saved. Collective.

    CheckpointError where all of them are damaged: never a fresh start then.
    """
    run.is_resumed = True
    root, session = root_of(run), begin_load(run, call)
    _refuse_hooks(run, root)
    run.claim = None  # the run goes on from what is there now
    if failure := session.control.attempt(lambda: note_series(run)).failure:
        raise CheckpointError(f"{failure}.")
    options = _options(run, session, data_position, strict)
    loaded = read.load_newest(live_of(run), root, session.control, options)
    if loaded is None:
        return None
    session.last_step = loaded.checkpoint.manifest.step
    return _loaded(run, session, loaded)


def _options(run: Run, session: SaveSession, data_position: bool, strict: bool) -> LoadOptions:
    return LoadOptions(run.config.shardkit.checkpoint.verify, strict, data_position, session.unfinished)


def begin_load(run: Run, call: str) -> SaveSession:
    """The session of a load, after all ranks have made this call and a save in flight has ended. Collective."""
    session = joint_session(run, call, "load")
    wait(run)
    return session


def _refuse_hooks(run: Run, place: Place) -> None:
    """UsageError where this run has load hooks, which cannot load from an object store."""
    if isinstance(place, Url) and run.hooks.at_load:
        raise UsageError(
            f"load_state: {place}: load hooks read files from a folder, which an object store does not have; copy the "
            "checkpoint to a disk and load that, or remove the hooks."
        )


def _refuse_place(path: Place, session: SaveSession) -> None:
    """CheckpointError where `path` is a folder of checkpoints, the project folder around it, or a part of one."""

    def look() -> str | None:
        return locate.refusal_of_place(path) if session.control.rank == 0 else None

    attempt = session.control.attempt(look, answer=lambda refusal: refusal, judge=lambda answers: answers[0])
    if problem := attempt.failure or attempt.verdict:
        raise CheckpointError(f"checkpoint: {path}: {problem}.")


def _loaded(run: Run, session: SaveSession, loaded: LoadedState) -> Place:
    record = loaded.checkpoint.manifest
    session.parent, session.last = record.save_id, None  # later saves of this run are a new series of steps
    for optimizer in run.optimizers:
        optimizer.optimizer.zero_grad()
    for model in run.models:
        drop_unreduced(model, {id(parameter) for parameter in every_parameter(model)})
    has_forgotten = [comm_hooks.forget_errors(model) for model in run.models]
    if any(has_forgotten) and run.process.rank == 0:
        log.warning(
            "checkpoint: what PowerSGD has left out of gradients is in no checkpoint; gradients are sent whole for the "
            "next %d steps (shardkit.ddp.power_sgd_start_step), and PowerSGD starts again after that.",
            run.config.shardkit.ddp.power_sgd_start_step,
        )
    _warn_of_another_batch(run, loaded)
    run.loads += 1
    if run.claim is not None:
        claim.know(run.claim, loaded.checkpoint.path)
    progress.post("loaded", record.step)
    if run.process.rank == 0:
        log.info("checkpoint: loaded step %d from %s", record.step, loaded.checkpoint.path)
        nan.warn(loaded.checkpoint.path, record, "loaded")
    return loaded.checkpoint.path


def _warn_of_another_batch(run: Run, loaded: LoadedState) -> None:
    """Warns where a world of an elastic run has not the batch of the world that saved: the script's `batch_size`
    depends on the number of ranks, which the micro-batches make up for already."""
    if settings.full_world_size() is None or run.process.rank != 0:
        return
    is_split = run.config.shardkit.data.split_batches
    ranks, saved_ranks = (1, 1) if is_split else (run.process.world_size, loaded.checkpoint.manifest.world_size)
    for name, loader in zip(live_of(run).loaders, run.loaders, strict=True):
        saved = loaded.common["loaders"].get(name, {}).get("global_batch")
        if saved is not None and saved * ranks != loader.total_batch_size * saved_ranks:
            log.warning(
                "elastic: the global batch has changed (got batches of %d samples in a world of %d, %d in one of %d in "
                "the checkpoint); give a batch_size that does not depend on the number of ranks, or that of all ranks "
                "with Accelerator(split_batches=True).",
                loader.total_batch_size,
                run.process.world_size,
                saved,
                loaded.checkpoint.manifest.world_size,
            )
