"""Converts a training state of Accelerate, torch.distributed.checkpoint or DeepSpeed into a shardkit checkpoint.

    sharded    pytorch_model_fsdp_0/, optimizer_0/             folders of torch.distributed.checkpoint
    full       pytorch_model_fsdp.bin, optimizer.bin           written by one process
    DDP        model.safetensors or pytorch_model.bin, optimizer.bin with numbers instead of names
    ZeRO       a folder of DeepSpeed's save_checkpoint (`zero.py`)

and of Accelerate scheduler.bin, scaler.pt and custom_checkpoint_N.pkl. Pickled files are opened with torch's
weights-only unpickler, or refused. The notes list what the source does not contain.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardkit import values
from shardkit.checkpoint.commands import dcp, foreign_files, foreign_optimizers, zero
from shardkit.checkpoint.commands.dcp import LazyTensor
from shardkit.checkpoint.files import folder, manifest
from shardkit.checkpoint.files.layout import Index, Mesh, TensorEntry, section_name
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.saving.save_request import SaveRequest
from shardkit.checkpoint.states import tensors
from shardkit.checkpoint.states.optimizers import settings_of
from shardkit.checkpoint.states.state import Captured
from shardkit.distributed import control, random_state
from shardkit.errors import CheckpointCorrupted, CheckpointError, ShardkitError
from shardkit.model.prepared import Prepared
from shardkit.wording import first_few

RUN_ID = "converted"
_NO_POSITION = (
    "it has no position in the data: use accelerator.skip_first_batches, or start at the beginning of an epoch"
)
_NO_RANDOM = "it has no random states: random generators are seeded from (seed, step, rank)"
# Names in a folder that Accelerate saved. Models and optimizers are read up to the first number that is missing.
_MODEL = re.compile(
    r"(pytorch_model_fsdp|pytorch_model|model)(_(?P<number>\d+))?"
    r"(-\d+-of-\d+(-[0-9a-f]{8})?)?(\.safetensors|\.bin)(\.index\.json)?|pytorch_model_fsdp_(?P<folder>\d+)"
)
_OPTIMIZER = re.compile(r"optimizer(_(?P<number>\d+)(\.bin)?|\.bin)")
# What else is read; the states of random generators and loaders, which have notes of their own; and a configuration.
_REST = re.compile(
    r"scheduler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt|random_states_\d+\.pkl"
    r"|(sampler|dl_state_dict)(_\d+)?\.bin|(generation_)?config\.json"
)


@dataclass
class Converted:
    """The new checkpoint and its contents; `notes` say what the source did not contain."""

    path: Path
    step: int
    models: int
    optimizers: int
    notes: list[str] = field(default_factory=list)


@dataclass
class _Found:
    models: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    objects: dict[str, Any]
    notes: list[str]
    step: int = 0
    """0: to be found in the optimizer's state."""


def convert(
    source: Path,
    root: Path,
    step: int | None = None,
    prepared: Prepared | None = None,
    weights_only: bool = False,
) -> Converted:
    """Write a step folder with the state in `source`, below `root` or, in a project, its `checkpoints`. Raises
    CheckpointError if it cannot be read.

    Without `step`, the optimizer's step is used. `prepared` is needed only if an optimizer numbers its parameters, as
    after DDP.
    """
    with _in_expected_form(source):
        found = _find(source, weights_only)
        named = [
            foreign_optimizers.by_name(state, number, found.models, prepared, source)
            for number, state in enumerate(found.optimizers)
        ]
        if step is None:
            step = found.step or foreign_optimizers.steps_made(named)
            if not step:
                found.notes.append("its step is unknown; saved as step 0: set it with --step")
        captured = _captured(found, named, step, source)
    final = locate.to_add_to(root) / folder.step_name(step)
    if not folder.STEP.fullmatch(final.name):
        raise CheckpointError(f"convert: --step: no such step can be resumed (got {step}); give at most 18 digits.")
    if final.exists():
        advice = "give another --step, or another folder"
        raise CheckpointError(f"convert: {final}: exists already, and checkpoints are not overwritten; {advice}.")
    request = SaveRequest(final=final, step=step, run_id=RUN_ID, in_series=True)
    alone = control.ControlGroup()
    save = write.ready(lambda: captured, request, alone)
    assert save is not None, "unless_equal is not set"
    write.finish(save, alone)
    return Converted(final, step, len(found.models), len(named), found.notes)


@contextmanager
def _in_expected_form(source: Path) -> Iterator[None]:
    """Turns what a value of another form raises, wherever it is met, into CheckpointCorrupted."""
    try:
        yield
    except (ShardkitError, OSError):
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise CheckpointCorrupted(
            f"convert: {source}: a value has another form than Accelerate and torch write ({reason}); it is damaged, "
            "or of another program: copy it from its source again, or convert only the model with --weights-only."
        ) from error


def _is_own(source: Path) -> bool:
    """Whether the folder is a checkpoint of shardkit, or contains some."""
    below = ("", "step-*/", f"{locate.SERIES}/step-*/")
    return any(True for folder in below for _ in source.glob(f"{folder}{manifest.NAME}"))


def _find(source: Path, weights_only: bool) -> _Found:
    if not source.is_dir():
        wrong, also = "no such folder", ""
        if source.exists():
            wrong, also = "a file, not a folder", "; load a file of torch.save in the script, before prepare()"
        raise CheckpointError(f"convert: {source}: {wrong}; give the folder that save_state made{also}.")
    if dcp.is_dcp(source):
        found = _bare(source, weights_only)
    elif zero.is_zero(source):
        found = _of_deepspeed(source, weights_only)
    elif weights_only:
        found = _Found(_models(source), [], {}, [_NO_POSITION])
    else:
        models, states = _models(source), foreign_optimizers.saved_in(source)
        notes = [_NO_POSITION, *_left_out(source, len(models), len(states))]
        found = _Found(models, states, _objects(source), notes)
    if not found.models:
        if _is_own(source):
            raise CheckpointError(f"convert: {source}: is shardkit's own; load it with resume() or load_state().")
        raise CheckpointError(
            f"convert: {source}: is not a checkpoint of Accelerate, torch.distributed.checkpoint or DeepSpeed (no "
            "pytorch_model_fsdp_0, pytorch_model_fsdp.bin, model.safetensors, .metadata, mp_rank_00_model_states.pt); "
            f"give the folder of one{_below(source)}."
        )
    found.notes.append(_NO_RANDOM)
    return found


def _bare(source: Path, weights_only: bool) -> _Found:
    """A folder that a script saved with DCP: {"model": ..., "optimizer": ...}, or the tensors of a model alone."""
    whole = dcp.read(source)
    inner = next((part for part in (whole, *whole.values()) if isinstance(part, dict) and "model" in part), None)
    _refuse_several(whole if inner is None else inner["model"], source)
    if inner is None:
        return _Found([_only_tensors(whole, source)], [], {}, [])
    optimizer = None if weights_only else next((inner[key] for key in ("optimizer", "optim") if key in inner), None)
    beside = [] if inner is whole else [key for key, part in whole.items() if part is not inner]
    left = sorted(str(key) for key in (*inner, *beside) if key not in ("model", "optimizer", "optim"))
    return _Found(
        models=[_only_tensors(dcp.loaded(inner["model"]), source)],
        optimizers=[foreign_optimizers.in_parts(dcp.loaded(optimizer), source)] if optimizer else [],
        objects={},
        notes=[f"not converted: {', '.join(left)}"] if left else [],
    )


def _of_deepspeed(source: Path, weights_only: bool) -> _Found:
    state = zero.read(source, weights_only)
    beside = {} if weights_only else _objects(source)  # where Accelerate called DeepSpeed
    return _Found(
        models=[_only_tensors(state.model, source)],
        optimizers=[foreign_optimizers.in_parts(state.optimizer, source)] if state.optimizer else [],
        objects=beside | ({"scheduler.0": state.scheduler} if state.scheduler else {}),
        notes=[_NO_POSITION, *state.notes, *([] if weights_only else _left_out(source, 1, 0, zero.files(source)))],
        step=state.step,
    )


def _below(source: Path) -> str:
    """The folders in this one that DeepSpeed saved, as a run's folder without a valid `latest` has them."""
    names = sorted(path.name for path in source.iterdir() if path.is_dir() and zero.is_zero(path))
    return f", such as {source / names[-1]}" if names else ""


def _refuse_several(model: Any, source: Path) -> None:
    """Raises CheckpointError if there are dicts of tensors where a model's tensors should be: which of them is a run's
    first model, and which optimizer is whose, is not in the folder."""
    named = dict(enumerate(model)) if isinstance(model, list) else model if isinstance(model, dict) else {}
    inside = [
        name for name, part in named.items() if any(map(_has_tensors, part if isinstance(part, list) else [part]))
    ]
    if inside:
        raise CheckpointError(
            f"convert: {source}: holds several models, or one of another name (got {first_few(inside, 4)}), and of a "
            "folder of torch.distributed.checkpoint only one is converted, named model; load this folder in a script "
            "with torch.distributed.checkpoint.load, into the prepared models, and call save_state() there."
        )


def _has_tensors(part: Any) -> bool:
    return isinstance(part, dict) and any(isinstance(value, LazyTensor) for value in part.values())


def _models(source: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (state := _model(source, len(found))) is not None:
        found.append(state)
    return found


def _model(source: Path, number: int) -> dict[str, Any] | None:
    tail = f"_{number}" if number else ""
    sharded = source / f"pytorch_model_fsdp_{number}"
    if dcp.is_dcp(sharded):
        whole = dcp.read(sharded)
        return _only_tensors(whole.get("model", whole), sharded)
    for stem in (f"pytorch_model_fsdp{tail}", f"pytorch_model{tail}", f"model{tail}"):
        if (found := foreign_files.weights_of(source, stem)) is not None:
            where, weights = found
            return _only_tensors(weights, where)
    return None


def _only_tensors(state: Any, where: Path) -> dict[str, Any]:
    here = f"convert: {where}: the model"
    if not isinstance(state, dict):
        raise CheckpointError(f"{here} is not a dict of tensors (got {type(state).__name__}); save its state_dict().")
    if not state:
        raise CheckpointError(f"{here} has no tensors (got an empty dict); give another checkpoint.")
    strangers = [name for name, value in state.items() if not isinstance(value, (torch.Tensor, LazyTensor))]
    strangers += [name for name in state if not isinstance(name, str)]
    if strangers:
        shown = ", ".join(map(str, strangers[:5]))
        raise CheckpointError(f"{here} holds more than named tensors (got {shown}); save only its state_dict().")
    for name, value in state.items():
        _check(value, f"convert: {where}: {name}")
    wrapped = all(name.startswith("module.") for name in state)  # DDP's prefix, if the wrapper was saved
    return {name.removeprefix("module.") if wrapped else name: value for name, value in state.items()}


def _check(value: Any, where: str) -> None:
    """Raises CheckpointError for a tensor that cannot be stored in a checkpoint."""
    wrong = None
    if value.dtype not in tensors.DTYPES:
        wrong = f"safetensors does not support this dtype (got {value.dtype})"
    elif isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_quantized):
        wrong = f"only dense tensors can be stored (got {'quantized' if value.is_quantized else value.layout})"
    elif isinstance(value, torch.Tensor) and value.is_meta:
        wrong = "it has no values (got a tensor on the meta device)"
    if wrong:
        raise CheckpointError(f"{where}: {wrong}; convert the tensor, and save the source checkpoint again.")


def _objects(source: Path) -> dict[str, Any]:
    """States of schedulers, the scaler and registered objects, by their names in shardkit's checkpoints."""
    found: dict[str, Any] = {}
    for path in sorted(source.iterdir()):
        if match := re.fullmatch(r"scheduler(?:_(\d+))?\.bin", path.name):
            found[f"scheduler.{match[1] or 0}"] = foreign_files.load(path)
        elif match := re.fullmatch(r"custom_checkpoint_(\d+)\.pkl", path.name):
            found[f"registered.{match[1]}"] = foreign_files.load(path)
        elif path.name == "scaler.pt":
            found["scaler"] = foreign_files.load(path)
    return found


def _left_out(source: Path, models: int, optimizers: int, known: Collection[str] = ()) -> list[str]:
    """A note on what is in the folder and is not read, such as the files of a save hook, or the Trainer's scheduler."""
    names = [path.name for path in source.iterdir() if path.name[0] != "."]
    left = sorted(name for name in names if not _is_read(name, models, optimizers) and name not in known)
    return [f"not converted: {first_few(left, 8)}"] if left else []


def _is_read(name: str, models: int, optimizers: int) -> bool:
    """Whether a file or folder is read where there are so many models and optimizers, or has a note of its own."""
    if match := _MODEL.fullmatch(name):
        return int(match["number"] or match["folder"] or 0) < models
    if match := _OPTIMIZER.fullmatch(name):
        return int(match["number"] or 0) < optimizers
    return _REST.fullmatch(name) is not None


def _captured(found: _Found, states: Sequence[Mapping[str, Any]], step: int, source: Path) -> Captured:
    """The state as one rank would capture it."""
    index = Index("sharded", 1)
    held: dict[str, dict[str, Any]] = {}
    alone = index.mesh_number(Mesh((1,)))

    def store(section: str, name: str, value: Any) -> str | None:
        if not isinstance(value, (torch.Tensor, LazyTensor)):
            return None
        _check(value, f"convert: {source}: {section}: {name}")
        index.sections[section][name] = TensorEntry(tuple(value.shape), tensors.DTYPES[value.dtype], alone, (None,))
        held[section][name] = value
        return name

    def begin(section: str) -> str:
        index.sections[section], index.aliases[section], held[section] = {}, {}, {}
        return section

    for number, model in enumerate(found.models):
        section = begin(section_name("model", number))
        for name, value in model.items():
            store(section, name, value)
    sections = [begin(section_name("optim", number)) for number in range(len(states))]
    encoded = [_optimizer(state, partial(store, name), name) for state, name in zip(states, sections, strict=True)]
    keep = partial(store, begin("objects"))
    counters = {"counters": {"step": step, "samples_seen": 0}}
    objects = {name: values.encode(value, name, keep) for name, value in (counters | found.objects).items()}
    index.sort()
    random_state.derive(0, step, 0)
    common = {"optimizers": encoded, "objects": objects, "loaders": {}, "seed": 0}
    return Captured(index, held, common, {"loaders": {}, "rng": random_state.capture(0)})


def _optimizer(optimizer: Mapping[str, Any], keep: Callable[[str, Any], str | None], section: str) -> dict[str, Any]:
    """What common.json has of an optimizer. `keep(path, value)` stores a tensor, and returns its name; None for other
    values."""
    groups = []
    for number, group in enumerate(optimizer["param_groups"]):
        settings = values.encode(settings_of(group), f"{section}.param_groups[{number}]", keep)
        groups.append({"params": list(group["params"]), "settings": settings})
    plain: dict[str, dict[str, Any]] = {}
    for name, row in optimizer["state"].items():
        for key, value in row.items():
            if keep(f"{name}/{key}", value) is None:
                plain.setdefault(name, {})[key] = values.encode(value, f"{name}/{key}", keep)
    encoded: dict[str, Any] = {"groups": groups, "plain": plain}
    for kind in ("globals", "extra"):
        for key, value in optimizer[kind].items():
            encoded.setdefault(kind, {})[key] = values.encode(value, f"{section}.{kind}.{key}", keep)
    return encoded
