"""save_state and save_model of a run: its objects, its checkpoint folder, one save at a time."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.exporting import save_model as exporting
from shardkit.checkpoint.files import folder, paths
from shardkit.checkpoint.loading.load_plan import Unfinished
from shardkit.checkpoint.saving import claim, lock, write
from shardkit.checkpoint.saving.async_save import AsyncSave
from shardkit.checkpoint.saving.save_request import PreparedSave, SaveRequest
from shardkit.checkpoint.states.replicas import Drift
from shardkit.checkpoint.states.state import Captured, Live, capture
from shardkit.config import files
from shardkit.config.schema import StateDictType
from shardkit.distributed import control, progress
from shardkit.errors import CheckpointSaveError, UsageError
from shardkit.log import get_logger
from shardkit.runtime.checkpoints import state_hooks
from shardkit.runtime.checkpoints.beginning import begin_save, session_alone, session_of
from shardkit.runtime.checkpoints.save_session import SaveSession
from shardkit.runtime.likely_mistakes import learning_rates, left_out
from shardkit.runtime.project import series_of
from shardkit.runtime.run import Run
from shardkit.storage.url import Place, Url
from shardkit.wording import first_few

log = get_logger(__name__)

# What follows from a difference between ranks, by kind (`replicas.Drift`), and what to do about it.
_DRIFT = {
    "buffers": "and rank 0's are saved; accelerator.reduce_buffers(model) before a save makes them equal on all",
    "weights": "and those of rank 0's replica are saved; change weights and learning rates alike on all ranks, and "
    "save local SGD's weights after they were averaged",
    "settings": learning_rates.CONSEQUENCE,
}


def save_state(run: Run, output: str | Path | None = None, *, blocking: bool | None = None) -> Place:
    """Saves the training state; returns its folder. Collective; CheckpointSaveError on all ranks where one fails.

    Without `output`, the next step-named folder of the project. An existing checkpoint is replaced as a whole when the
    new one is committed; if this run saved it and the state is unchanged to the byte, it is kept. With `blocking` False
    the state is copied and written in the background; where such a save fails, the next call raises on every rank,
    unless it has `blocking` True.
    """
    final = _final(run, output)
    _refuse_in_store(run, final)
    session = begin_save(run, "save_state")
    _settle(run, is_last_chance=blocking is True)
    is_blocking = run.config.shardkit.checkpoint.blocking if blocking is None else blocking
    return _save(run, session, _request(run, session, final, output), is_blocking)


def save_alone(run: Run, output: str | Path | None = None) -> Place:
    """As `save_state`, by rank 0 without the others, where every rank holds the whole state. What the others hold
    differently, their random states too, is not in it."""
    final = _final(run, output)
    _refuse_in_store(run, final)
    session = session_alone(run, "save_state")
    progress.post("save", run.counters.step)
    return _save(run, session, _request(run, session, final, output), is_blocking=True)


def _refuse_in_store(run: Run, final: Place) -> None:
    """UsageError where this run's state cannot be saved into an object store."""
    if not isinstance(final, Url):
        return
    if run.hooks.at_save:
        raise UsageError(
            f"save_state: {final}: save hooks write files into a folder, which an object store does not have; save to "
            "a folder on a disk, or remove the hooks."
        )
    if state_kind(run) == "full":
        raise UsageError(
            f"save_state: {final}: with FULL_STATE_DICT all ranks write one file, which object stores do not support; "
            "use SHARDED_STATE_DICT, and for whole files save_model or `shardkit checkpoint merge URL -o FOLDER`."
        )


def _save(run: Run, session: SaveSession, request: SaveRequest, is_blocking: bool) -> Place:
    _warn_of_open_window(run)
    left_out.warn(run)
    elsewhere: frozenset[int] = frozenset()
    if run.hooks.at_save:
        staging, elsewhere = state_hooks.save(run.hooks, run.models, request, session.control)
        request = replace(request, staging=staging)
    prepared = write.ready(lambda: _captured(run, session.control, elsewhere), request, session.control)
    if prepared is None:
        log.info("checkpoint: step %d is saved in %s already, to the byte", request.step, request.where)
    else:
        _warn_of_drift(session, prepared.drift)
        if is_blocking:
            write.finish(prepared, session.control)
            _committed(session, request)
        else:
            _save_beside(run, session, request, prepared)
    progress.post("saved", request.step)
    return request.final


def _settle(run: Run, is_last_chance: bool) -> None:
    """As `wait`; but before a save with `blocking` True, an earlier failed one is only logged. Collective."""
    try:
        wait(run)
    except CheckpointSaveError as error:
        if not is_last_chance:
            raise
        log.error("%s", error)


def _captured(run: Run, agreed: control.ControlGroup, elsewhere: frozenset[int]) -> Captured:
    return capture(replace(live_of(run), elsewhere=elsewhere), state_kind(run), agreed.rank, agreed.world_size)


def _warn_of_drift(session: SaveSession, drift: Drift) -> None:
    """Warns of what differs between ranks, once of each kind."""
    for kind, names in vars(drift).items():
        if not names or kind in session.has_warned_of:
            continue
        session.has_warned_of.add(kind)
        if session.control.rank == 0:
            log.warning("checkpoint: %s differ between ranks (%s), %s.", kind, first_few(names, 5), _DRIFT[kind])


def _save_beside(run: Run, session: SaveSession, request: SaveRequest, prepared: PreparedSave) -> None:
    if session.background is None:
        beside = control.start_background(run.config.shardkit.checkpoint.timeout_s)
        session.background = AsyncSave(beside)
    optimizers = [item.optimizer for item in run.optimizers]
    session.background.start(prepared, optimizers, lambda: _committed(session, request))


def _committed(session: SaveSession, request: SaveRequest) -> None:
    session.last = request.final
    if request.in_series:
        session.last_step = request.step
        progress.committed(request.step)


def wait(run: Run) -> None:
    """Waits until a save in flight is committed. Collective; every rank raises CheckpointSaveError where it failed."""
    session = session_of(run)
    if session.background is not None:
        session.background.wait(session.control)


def close(run: Run) -> None:
    """Finishes the save in flight and releases the folder's lock. Collective, if anything was saved or loaded."""
    if run.saving_alone is not None:
        run.saving_alone.release()
    run.saving_alone = None
    session = run.saving
    if session is None:
        return
    try:
        wait(run)
    finally:
        run.saving = None
        session.release()


def forget(run: Run) -> None:
    """Drops what the session knows of the prepared objects: the next save starts a new series of states.

    Not collective. A save in flight continues; this waits until it has copied the state.
    """
    session = run.saving
    if session is None:
        return
    if session.background is not None:
        session.background.forget()
    session.parent, session.last, session.has_warned_of = None, None, set()
    session.unfinished = Unfinished()


def _final(run: Run, output: str | Path | None) -> Place:
    """The folder of the checkpoint. A save in the background goes on after the script has changed its folder."""
    run.refuse_without_objects()
    if output is None:
        return paths.absolute(folder.step_folder(root_of(run), run.counters.step))
    final = paths.named(output, "save_state")
    if isinstance(final, Path):
        paths.refuse_working_folder(final, output)
    return final


def _request(run: Run, session: SaveSession, final: Place, output: str | Path | None) -> SaveRequest:
    section, project, loaders = run.config.shardkit.checkpoint, run.project, run.loaders
    return SaveRequest(
        final=final,
        step=run.counters.step,
        run_id=session.run_id,
        name=str(root_of(run) / final.name if output is None else output),
        epoch=loaders[0].epoch if loaders else 0,
        samples_seen=run.counters.state_dict()["samples_seen"],
        parent=session.parent,
        replace=True,
        digest=section.digest,
        config_text=files.dump(run.config),
        mesh=mesh_of(run),
        in_series=output is None,
        keep_last=project.total_limit or section.keep_last,
        keep_every=section.keep_every,
        unless_equal=session.last == final and not run.hooks.at_save,
        compare_buffers="buffers" not in session.has_warned_of,
        claim=partial(_claim, run, session, final.parent) if output is None else lambda: None,
    )


def note_series(run: Run) -> None:
    """On rank 0, before a load: notes what is in the run's folder, unless it has; warns where another run saves there
    now. CheckpointError where it cannot be read."""
    root = series_of(run.project)
    if root is None or not run.process.is_main or run.claim is not None:
        return
    run.claim = claim.begin(paths.absolute(root))
    if isinstance(root, Path) and (who := lock.saver_of(root)):
        log.warning(
            "checkpoint: %s: %s saves into this folder, and saves of this run fail as long as it does; use another "
            "folder, or start this run once that one has ended.",
            root,
            who,
        )


def _claim(run: Run, session: SaveSession, root: Place) -> None:
    """Claims the folder for this run. On rank 0; CheckpointSaveError where another run saves there, or has since this
    one began."""
    if isinstance(root, Path):
        _lock(session, root)
    if run.claim is None or run.claim.root != root:
        run.claim = claim.begin(root)
    claim.refuse_others(run.claim, session.run_id)


def _lock(session: SaveSession, root: Path) -> None:
    if session.lock is not None and session.lock.path.parent == root and session.lock.is_in_place():
        return
    folder.make(root)
    session.release()
    control = session.control
    # Half of the time after which the other ranks, which wait meanwhile, give up.
    session.lock = lock.acquire(root, session.run_id, prune_s=control.timeout_s / 2, meanwhile=control.work)


def mesh_of(run: Run) -> dict[str, Any]:
    """The mesh in the manifest's form."""
    mesh = run.mesh
    if mesh is None:
        return {"names": [], "shape": []}
    return {"names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.mesh.shape)}


def state_kind(run: Run) -> Any:
    """The kind of state dict to write: full or sharded."""
    return "full" if run.config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT else "sharded"


def root_of(run: Run) -> Place:
    """The project's checkpoint folder; UsageError where the script sets none."""
    if (found := series_of(run.project)) is None:
        raise UsageError(
            "checkpoint: no folder is given (got None); give one, or Accelerator(project_config="
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
        )
    return found


def _warn_of_open_window(run: Run) -> None:
    done = run.counters.micro_step
    if done and not run.accumulation.sync_gradients and run.process.rank == 0:
        log.warning(
            "checkpoint: saved inside an accumulation window (micro-batch %d of %d); a resumed run repeats the "
            "window from its start: save after an optimizer step.",
            done,
            run.accumulation.steps,
        )


def live_of(run: Run) -> Live:
    """The run's objects by their names in a checkpoint."""
    objects: dict[str, Any] = {"counters": run.counters}
    scaler = run.accumulation.loss_scale.scaler
    if scaler is not None:
        objects["scaler"] = scaler
    objects |= {f"scheduler.{number}": item for number, item in enumerate(run.schedulers)}
    objects |= {f"registered.{number}": item for number, item in enumerate(run.registered)}
    return Live(
        models=run.models,
        optimizers=[item.optimizer for item in run.optimizers],
        objects=objects,
        loaders={f"loader.{number}": item for number, item in enumerate(run.loaders)},
        seed=run.config.shardkit.seed,
        random_states=run.accumulation.data.random_states(),
        take=partial(state_hooks.load, run.hooks, run.models) if run.hooks.at_load else None,
    )


def save_model(
    run: Run,
    model: torch.nn.Module,
    folder: str | Path,
    max_shard_size: str | int = "5GB",
    dtype: str | torch.dtype | None = None,
) -> None:
    """Writes the full model as safetensors that other programs can open; of a peft model, its adapters. Collective."""
    path = paths.named(folder, "save_model")
    _export(begin_save(run, "save_model"), model, path, max_shard_size, dtype)


def save_model_alone(run: Run, model: torch.nn.Module, folder: str | Path, max_shard_size: str | int) -> None:
    """As `save_model`, by rank 0 without the others, where every rank holds the whole model."""
    session = session_alone(run, "save_model")
    _export(session, model, paths.named(folder, "save_model"), max_shard_size, None)


def _export(
    session: SaveSession,
    model: torch.nn.Module,
    path: Place,
    max_shard_size: str | int,
    dtype: str | torch.dtype | None,
) -> None:
    compare = "buffers" not in session.has_warned_of
    _warn_of_drift(session, exporting.save(model, path, session.control, max_shard_size, dtype, compare))
