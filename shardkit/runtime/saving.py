"""What save_state, load_state and resume do: the run's objects, its folder of checkpoints, one save at a time."""

import atexit
import uuid
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.checkpoint import folder, locate, lock, manifest, read, state, write
from shardkit.checkpoint import save_model as exporting
from shardkit.checkpoint.lock import Lock
from shardkit.checkpoint.read import Loaded
from shardkit.checkpoint.snapshot import Background
from shardkit.checkpoint.state import Live
from shardkit.checkpoint.write import Request
from shardkit.config import files
from shardkit.config.schema import StateDictType
from shardkit.distributed import control, progress
from shardkit.distributed.control import ControlGroup
from shardkit.errors import CheckpointError, CheckpointSaveError, UsageError
from shardkit.log import get_logger

if TYPE_CHECKING:
    from shardkit.runtime.accelerator import Accelerator

logger = get_logger(__name__)


@dataclass
class Session:
    """What saving and loading keep over a run."""

    control: ControlGroup
    run_id: str
    group: Any
    background: Background | None = None
    lock: Lock | None = None
    parent: str | None = None
    last: tuple[Path, int] | None = None


_sessions: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()


def session_of(accelerator: "Accelerator") -> Session:
    """This run's session. Collective on first use, and where the process group is a new one."""
    group = dist.group.WORLD if dist.is_initialized() else None
    found = _sessions.get(accelerator)
    if found is None or found.group is not group:
        agreed = control.start(accelerator.config.shardkit.checkpoint.timeout_s)
        found = _sessions[accelerator] = Session(agreed, agreed.share(uuid.uuid4().hex), group)
    return found


def save_state(accelerator: "Accelerator", output: str | Path | None = None, *, blocking: bool | None = None) -> Path:
    """The folder with the whole training state. Collective; CheckpointSaveError on all ranks where one fails.

    Without `output`, the next step-named folder of the project. An existing checkpoint is replaced as a whole, and
    stays as it is until the new one is committed. With `blocking` False the state is copied aside and written beside
    training; where such a save fails, the next call raises on every rank, unless it says `blocking` True.
    """
    session = session_of(accelerator)
    _settle(accelerator, is_last_chance=blocking is True)
    request = _request(accelerator, session, output)
    if _is_saved_already(request, session):
        return request.final
    _warn_of_open_window(accelerator)
    progress.post("save", request.step)
    session.control.tick = lambda: progress.post("save", request.step)
    if request.in_series:
        _lock(session, request.final.parent)
    if accelerator.config.shardkit.checkpoint.blocking if blocking is None else blocking:
        write.save(live_of(accelerator), _kind(accelerator), request, session.control)
        _committed(session, request)
        progress.post("saved", request.step)
    else:
        _save_beside(accelerator, session, request)
    return request.final


def _settle(accelerator: "Accelerator", is_last_chance: bool) -> None:
    """As `wait`; but where the script insists on a save now, one that failed before is only logged. Collective."""
    try:
        wait(accelerator)
    except CheckpointSaveError as error:
        if not is_last_chance:
            raise
        logger.error("%s", error)


def _save_beside(accelerator: "Accelerator", session: Session, request: Request) -> None:
    if session.background is None:
        beside = control.start_beside(accelerator.config.shardkit.checkpoint.timeout_s)
        session.background = Background(beside)
        atexit.register(session.background.last_words)
    live = live_of(accelerator)
    prepared = write.prepare(live, _kind(accelerator), request, session.control)
    session.background.start(prepared, live.optimizers, lambda: _committed(session, request))


def _committed(session: Session, request: Request) -> None:
    session.last = (request.final, request.step)
    if request.in_series:
        progress.committed(request.step)


def wait(accelerator: "Accelerator") -> None:
    """Until a save in flight is committed. Collective; every rank raises CheckpointSaveError where it failed."""
    session = session_of(accelerator)
    if session.background is not None:
        session.background.wait(session.control)


def close(accelerator: "Accelerator") -> None:
    """Finish the save in flight and leave the folder to other runs. Collective, where anything was saved or loaded."""
    if accelerator not in _sessions:
        return
    try:
        wait(accelerator)
    finally:
        session = _sessions.pop(accelerator)
        if session.lock is not None:
            session.lock.release()


def _request(accelerator: "Accelerator", session: Session, output: str | Path | None) -> Request:
    section, project = accelerator.config.shardkit.checkpoint, accelerator.project
    step = accelerator.counters.step
    in_series = output is None
    final = folder.step_folder(root_of(accelerator), step) if output is None else _named(output, "save_state")
    loaders = accelerator.loaders
    return Request(
        final=final,
        step=step,
        run_id=session.run_id,
        epoch=loaders[0].epoch if loaders else 0,
        samples_seen=accelerator.accumulation.state_dict()["samples_seen"],
        parent=session.parent,
        replace=True,
        digest=section.digest,
        config_text=files.dump(accelerator.config),
        mesh=_mesh(accelerator),
        in_series=in_series,
        keep_last=project.total_limit or section.keep_last,
        keep_every=section.keep_every,
    )


def _named(output: Any, caller: str) -> Path:
    """The folder that a script names; UsageError where that is none."""
    if not isinstance(output, (str, PathLike)) or not str(output):
        raise UsageError(f"{caller}: the folder has no name (got {output!r}); name one.")
    path = Path(output)
    return path if path.name else path.resolve()  # "." has no name that a temporary folder beside it could bear


def _mesh(accelerator: "Accelerator") -> dict[str, Any]:
    mesh = accelerator.mesh
    if mesh is None:
        return {"names": [], "shape": []}
    return {"names": list(mesh.mesh_dim_names or ()), "shape": list(mesh.mesh.shape)}


def _kind(accelerator: "Accelerator") -> Any:
    return "full" if accelerator.config.fsdp.state_dict_type is StateDictType.FULL_STATE_DICT else "sharded"


def root_of(accelerator: "Accelerator") -> Path:
    """The project's folder of checkpoints; UsageError where the script names none."""
    project = accelerator.project
    if project.project_dir is None or not project.automatic_checkpoint_naming:
        raise UsageError(
            "checkpoint: no folder is given (got None); give one, or Accelerator(project_config="
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True))."
        )
    return Path(project.project_dir) / locate.SERIES


def _is_saved_already(request: Request, session: Session) -> bool:
    """Whether this run itself saved this step in this folder a moment ago: a step is written once."""
    mine = False
    if request.in_series and session.control.rank == 0 and session.last == (request.final, request.step):
        try:
            mine = folder.inspect(request.final).run_id == session.run_id
        except (CheckpointError, OSError):
            mine = False
    mine = session.control.share(mine)
    if mine:
        logger.info("checkpoint: step %d is saved already in %s", request.step, request.final)
    return mine


def _warn_of_open_window(accelerator: "Accelerator") -> None:
    done = accelerator.counters.micro_step
    if done and not accelerator.sync_gradients and accelerator.process.rank == 0:
        logger.warning(
            "checkpoint: saved inside a window of accumulation (micro-batch %d of %d); a resumed run does the window "
            "again from its start: save after an optimizer step.",
            done,
            accelerator.gradient_accumulation_steps,
        )


def _lock(session: Session, root: Path) -> None:
    """One run a folder. Collective: all ranks raise where another run holds it."""
    problem = None
    if session.control.rank == 0 and (session.lock is None or session.lock.path.parent != root):
        try:
            root.mkdir(parents=True, exist_ok=True)
            if session.lock is not None:
                session.lock.release()
                session.lock = None
            session.lock = lock.acquire(root, session.run_id)
            atexit.register(session.lock.release)  # for scripts that end without end_training()
        except CheckpointSaveError as error:
            problem = str(error)
        except OSError as error:
            problem = f"checkpoint: {root}: cannot be written ({error.strerror}); nothing was saved."
    problem = session.control.share(problem)
    if problem:
        raise CheckpointSaveError(problem)


def live_of(accelerator: "Accelerator") -> Live:
    """The run's objects by the names that they have in a checkpoint."""
    objects: dict[str, Any] = {"counters": accelerator.accumulation}
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    objects |= {f"scheduler.{number}": item for number, item in enumerate(accelerator.schedulers)}
    objects |= {f"registered.{number}": item for number, item in enumerate(accelerator.registered)}
    return Live(
        models=accelerator.models,
        optimizers=[item.optimizer for item in accelerator.optimizers],
        objects=objects,
        loaders={f"loader.{number}": item for number, item in enumerate(accelerator.loaders)},
        seed=accelerator.config.shardkit.seed,
    )


def load_state(
    accelerator: "Accelerator", path: str | Path | None = None, *, data_position: bool = True, strict: bool = True
) -> Path:
    """The folder of the state that the run now has: `path`, and no other; or the project's newest valid checkpoint.

    Collective. CheckpointError on all ranks, and nothing changed, where it is damaged or does not fit.
    """
    if path is None:
        root = root_of(accelerator)
        found = _load_newest(accelerator, root, data_position=data_position, strict=strict)
        if found is None:
            raise CheckpointError(f"checkpoint: {root}: no checkpoint here yet; call save_state() first.")
        return found
    session = _begin_load(accelerator)
    path = Path(path)
    _refuse_series(path, session)
    verify = accelerator.config.shardkit.checkpoint.verify
    loaded = read.load(
        live_of(accelerator), path, session.control, verify=verify, strict=strict, data_position=data_position
    )
    return _loaded(accelerator, session, loaded)


def resume(accelerator: "Accelerator") -> bool:
    """Whether the project's newest valid checkpoint was loaded; False where none was ever saved. Collective.

    Where every one is damaged, that is a CheckpointError, and never a fresh start.
    """
    accelerator.is_resumed = True
    return _load_newest(accelerator, root_of(accelerator)) is not None


def _load_newest(
    accelerator: "Accelerator", root: Path, data_position: bool = True, strict: bool = True
) -> Path | None:
    session = _begin_load(accelerator)
    verify = accelerator.config.shardkit.checkpoint.verify
    loaded = read.load_newest(
        live_of(accelerator), root, session.control, verify=verify, strict=strict, data_position=data_position
    )
    return None if loaded is None else _loaded(accelerator, session, loaded)


def _begin_load(accelerator: "Accelerator") -> Session:
    session, step = session_of(accelerator), accelerator.counters.step
    wait(accelerator)
    progress.post("load", step)
    session.control.tick = lambda: progress.post("load", step)
    return session


def _refuse_series(path: Path, session: Session) -> None:
    """A folder of checkpoints, or the project's folder around it, is not one of them: say which there are."""
    is_one = session.control.rank != 0 or (path / manifest.NAME).exists()
    found = [] if is_one else folder.steps(path) or folder.steps(path / locate.SERIES)
    newest = session.control.share(str(found[0].path) if found else None)
    if newest is not None:
        raise CheckpointError(f"checkpoint: {path}: a folder of checkpoints; name one of them, such as {newest}.")


def _loaded(accelerator: "Accelerator", session: Session, loaded: Loaded) -> Path:
    record = loaded.checkpoint.manifest
    session.parent, session.last = record.save_id, None  # what this run saves from here on is another line of steps
    for optimizer in accelerator.optimizers:
        optimizer.optimizer.zero_grad()
    progress.post("data", record.step)
    if accelerator.process.rank == 0:
        logger.info("checkpoint: loaded step %d from %s", record.step, loaded.checkpoint.path)
    return loaded.checkpoint.path


def save_model(
    accelerator: "Accelerator",
    model: torch.nn.Module,
    folder: str | Path,
    max_shard_size: str | int = "5GB",
    dtype: str | torch.dtype | None = None,
) -> None:
    """Write the whole model as safetensors that other programs open; of a peft model its adapters. Collective."""
    session, step = session_of(accelerator), accelerator.counters.step
    progress.post("save", step)
    session.control.tick = lambda: progress.post("save", step)
    exporting.save(model, _named(folder, "save_model"), session.control, max_shard_size, dtype)


def get_state_dict(accelerator: "Accelerator", model: torch.nn.Module) -> dict[str, Any]:
    """The model's whole state dict in host memory, on rank 0; empty elsewhere. Collective: tensor by tensor."""
    whole: dict[str, Any] = {}
    for name, tensor in state.model_tensors(model).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if accelerator.process.rank == 0:
            whole[name] = full.cpu() if isinstance(tensor, DTensor) else full.detach().cpu().clone()
    return whole
