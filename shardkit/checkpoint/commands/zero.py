"""Reads a checkpoint of DeepSpeed, of ZeRO stages 0 to 3, without executing code from it.

    latest                                      the tag of the newest, in the folder above
    mp_rank_00_model_states.pt                  stages 0 to 2: names, shapes, buffers
    zero_pp_rank_R_mp_rank_00_model_states.pt   stage 3: the same, by rank
    ..zero_pp_rank_R_mp_rank_00_optim_states.pt rank R's part of the weights in fp32, and of the optimizer's state

Stages 1 and 2 join a param group's parameters, in their order, to one vector, of which rank R has part R. Stage 3 gives
rank R part R of every parameter, padded to equal parts. The files are opened with torch's weights-only unpickler, which
makes plain objects of DeepSpeed's own classes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.commands import dcp
from shardkit.checkpoint.commands.dcp import LazyTensor
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.wording import first_few

_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"\w*zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_CLASSES = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# What a file of model states has beside the script's own `client_state`.
_OF_DEEPSPEED = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "micro_steps", "dp_world_size",
    "mp_world_size", "ds_config", "ds_version", "ds_autoep_layers", "checkpoint_parallel_dimensions",
}  # fmt: skip


@dataclass
class ZeroState:
    """`optimizer` as torch's state_dict, with names in place of numbers but for stage 0."""

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


class _Plain:
    """Stands in for a class of DeepSpeed's."""

    def __init__(self, *_: Any) -> None: ...


def is_zero(folder: Path) -> bool:
    """Whether DeepSpeed saved this folder, or names one in it as its latest."""
    return bool(_numbered(_tagged(folder), _MODEL))


def files(folder: Path) -> set[str]:
    """The names of what DeepSpeed wrote into the folder, and `read` reads, or needs not."""
    of_ranks = {path.name for pattern in (_MODEL, _OPTIMIZER) for _, _, path in _numbered(folder, pattern)}
    tag = _tagged(folder).relative_to(folder).parts[:1]
    return {"latest", "zero_to_fp32.py", "zero_to_torch.py", *tag, *of_ranks}


def read(folder: Path, weights_only: bool) -> ZeroState:
    """The state, with a LazyTensor for each part. CheckpointError where it is of another kind, or incomplete."""
    folder = _tagged(folder)
    where = f"convert: {folder}"
    models = [_load(path) for path in _in_order(folder, _numbered(folder, _MODEL), where)]
    first = models[0]
    if not isinstance(first.get("module"), dict):
        raise CheckpointError(f"{where}: has no weights of a whole model (pipeline parallel?); {_BY_DEEPSPEED}")
    paths = _in_order(folder, _numbered(folder, _OPTIMIZER), where)
    state = _joined(models, paths, where, weights_only) if paths else _whole(first, where, weights_only)
    scheduler = first.get("lr_scheduler")
    if isinstance(scheduler, dict) and "last_epoch" not in scheduler:
        state.notes.append("its scheduler is DeepSpeed's own, and not converted: make torch's at this step")
    elif not weights_only:
        state.scheduler = scheduler
    if left := sorted(str(name) for name in first.keys() - _OF_DEEPSPEED):
        state.notes.append(f"not converted, of the script's client_state: {first_few(left, 8)}")
    return state


def _joined(models: list[dict[str, Any]], paths: list[Path], where: str, weights_only: bool) -> ZeroState:
    """Stages 1 to 3, from the model states and the files of the optimizer's."""
    first = models[0]
    parts = _Parts(first["param_shapes"], [_part_of(path) for path in paths], where)
    if parts.is_stage_3 and len(models) != len(paths):
        counts = f"got {len(models)} of model states, {len(paths)} of optimizer states"
        raise CheckpointError(f"{where}: files of ranks are missing ({counts}); copy all from their source.")
    _refuse_other_steps([model.get("global_steps") for model in models], where)
    frozen = first.get("frozen_param_shapes") or {}
    fragments = {name: [model["frozen_param_fragments"][name].flatten() for model in models] for name in frozen}
    model = first["module"] | parts.weights() | {name: _tensor(fragments[name], frozen[name]) for name in frozen}
    model |= {name: model[of] for name, of in first.get("shared_params", {}).items() if of in model}
    state = ZeroState(_step(first), model, None if weights_only else parts.optimizer())
    kept = {*(first.get("buffer_names") or ()), *parts.names(), *frozen}
    absent = [name for name, value in model.items() if name not in kept and tuple(value.shape) == (0,)]
    if parts.is_stage_3 and absent:
        state.notes.append(f"not in it, as tied to another, or neither trained nor frozen: {first_few(absent, 4)}")
        state.model = {name: value for name, value in model.items() if name not in absent}
    return state


def _whole(first: dict[str, Any], where: str, weights_only: bool) -> ZeroState:
    """Stage 0, from the only file."""
    optimizer = first.get("optimizer")
    if first.get("param_shapes"):
        text = "without files of optimizer states (..optim_states.pt), which have its weights in fp32"
        raise CheckpointError(f"{where}: {text}; copy all files from their source.")
    state = ZeroState(_step(first), dict(first["module"]), None if weights_only else optimizer)
    if isinstance(optimizer, dict) and "optimizer_state_dict" in optimizer:
        if not weights_only:
            raise CheckpointError(
                f"{where}: stage 0 in 16 bits numbers its weights in fp32, and they are not converted; convert the "
                "16-bit weights with --weights-only, or save again with stage 1."
            )
        state.notes.append("its weights in fp32 are numbered, and not converted: these are the model's, in 16 bits")
    return state


def _step(first: dict[str, Any]) -> int:
    return int(first.get("global_steps", 0))


_BY_DEEPSPEED = "write the weights with DeepSpeed's zero_to_fp32.py, and load those before prepare()."


def _tagged(folder: Path) -> Path:
    """The folder that `latest` names, if it is in this one; else the folder itself."""
    try:
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
        is_inside = (folder / tag).is_dir() and (folder / tag).resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):
        return folder
    return folder / tag if is_inside else folder


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, int, Path]]:
    """(tensor-parallel part, rank, file) of those whose names match."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = ((pattern.fullmatch(path.name), path) for path in paths)
    return sorted((int(match["part"]), int(match["rank"] or 0), path) for match, path in found if match)


def _in_order(folder: Path, files: Sequence[tuple[int, int, Path]], where: str) -> list[Path]:
    """By rank. CheckpointError for several parts of a layer, experts in files of their own, or a missing rank."""
    if any(part for part, _, _ in files):
        raise CheckpointError(f"{where}: is tensor parallel (got {files[-1][2].name}); {_BY_DEEPSPEED}")
    if experts := sorted(path.name for path in folder.glob("*expert_*_model_states.pt")):
        raise CheckpointError(f"{where}: has experts of its own on each rank (got {experts[0]}); {_BY_DEEPSPEED}")
    if [rank for _, rank, _ in files] != list(range(len(files))):
        names = first_few([path.name for _, _, path in files], 4)
        raise CheckpointError(f"{where}: files of ranks are missing (got {names}); copy all from their source.")
    return [path for _, _, path in files]


def _load(path: Path) -> dict[str, Any]:
    stand_ins: list[Any] = [(type(name.rpartition(".")[2], (_Plain,), {}), name) for name in _CLASSES]
    with torch.serialization.safe_globals(stand_ins):
        found = dcp.load_plain(path, f"convert: {path}", mmap=True)
    if not isinstance(found, dict):
        raise CheckpointCorrupted(f"convert: {path}: not a dict (got {type(found).__name__}); it is damaged.")
    return found


def _part_of(path: Path) -> dict[str, Any]:
    """A rank's part of the optimizer. CheckpointError where the run did not partition it."""
    found = _load(path).get("optimizer_state_dict")
    if not isinstance(found, dict) or not {"single_partition_of_fp32_groups", "fp32_flat_groups"} & found.keys():
        raise CheckpointError(f"convert: {path}: has no weights of ZeRO's stages 1 to 3; {_BY_DEEPSPEED}")
    return found


def _refuse_other_steps(steps: list[Any], where: str) -> None:
    found = sorted({float(step) for step in steps if step is not None})
    if len(found) > 1:
        text = f"got steps {', '.join(f'{step:g}' for step in found)}"
        raise CheckpointCorrupted(f"{where}: its files are of several runs ({text}); copy all from their source.")


class _Parts:
    """The parts of all ranks, and where each trained parameter is in them."""

    def __init__(self, shapes: Sequence[Mapping[str, Sequence[int]]], ranks: list[dict[str, Any]], where: str) -> None:
        """`shapes`: of the parameters of each param group, of which stage 3 may make several (its sub_group_size)."""
        self._shapes, self._ranks, self._where = shapes, ranks, where
        self.is_stage_3 = "fp32_flat_groups" in ranks[0]
        self._paddings: list[list[int]] | None = ranks[0].get("param_alignment_paddings")
        """Elements after each parameter of a group, in versions that align them (stages 1 and 2)."""
        counts = ranks[0].get("partition_count")
        if (found := max(counts) if isinstance(counts, list) else counts) != len(ranks):
            wrong, advice = "are missing", "copy all from their source"
            if isinstance(found, int) and found < len(ranks):
                wrong, advice = "are of another run", f"remove those from rank {found} on, if they are the older ones"
            raise CheckpointError(f"{where}: files of ranks {wrong} (got {len(ranks)} of {found}); {advice}.")

    def names(self) -> list[str]:
        return [name for shapes in self._shapes for name in shapes]

    def weights(self) -> dict[str, LazyTensor]:
        name = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
        return self._tensors([rank[name] for rank in self._ranks])

    def optimizer(self) -> dict[str, Any]:
        """As torch's state_dict, with names for numbers."""
        states, numbers = self._numbered_states(), range(len(self._shapes))
        rows = [[state["state"].get(number, {}) for number in numbers] for state in states]
        _refuse_other_steps([rank[0].get("step") for rank in rows], self._where)
        named: dict[str, dict[str, Any]] = {name: {} for name in self.names()}
        for key, value in rows[0][0].items():
            if isinstance(value, torch.Tensor) and value.dim() == 1:
                found: Mapping[str, Any] = self._tensors([[row[key] for row in rank] for rank in rows])
            else:
                found = dict.fromkeys(named, value)
            for name in named:
                named[name][key] = found[name]
        groups = [
            {**group, "params": [name for number in group["params"] for name in self._shapes[number]]}
            for group in states[0]["param_groups"]
        ]
        return {"state": {name: row for name, row in named.items() if row}, "param_groups": groups}

    def _numbered_states(self) -> list[dict[str, Any]]:
        """Each rank's state of the optimizer, by the numbers of the model's param groups. CheckpointError where it is
        of another form."""
        name = "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        states: list[Any] = [rank.get(name) for rank in self._ranks]
        if not all(isinstance(state, dict) and "param_groups" in state for state in states):
            raise CheckpointError(
                f"{self._where}: its optimizer's state has another form (an elastic checkpoint?); convert only the "
                "model with --weights-only."
            )
        members, count = [group["params"] for group in states[0]["param_groups"]], len(self._shapes)
        if [number for those in members for number in those] != [*range(count)]:
            raise CheckpointError(
                f"{self._where}: its optimizer has other param groups than its model (got {members}, {count} in the "
                "model); convert only the model with --weights-only."
            )
        return states

    def _tensors(self, vectors: list[list[torch.Tensor]]) -> dict[str, LazyTensor]:
        """{name: tensor} of all trained parameters. `vectors`: of each rank, by group or sub-group."""
        cuts = self._cuts_by_parameter(vectors) if self.is_stage_3 else self._cuts_by_group(vectors)
        shapes = {name: shape for of_group in self._shapes for name, shape in of_group.items()}
        return {name: _tensor(found, shapes[name]) for name, found in cuts}

    def _cuts_by_group(self, vectors: list[list[torch.Tensor]]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Stages 1 and 2: a group is one vector, divided among the ranks."""
        for number, shapes in enumerate(self._shapes):
            paddings = self._paddings[number] if self._paddings else [0] * len(shapes)
            offset = 0
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                yield name, _cut([rank[number] for rank in vectors], offset, prod(shape), f"{self._where}: {name}")
                offset += prod(shape) + padding

    def _cuts_by_parameter(self, vectors: list[list[torch.Tensor]]) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """Stage 3: a rank's vectors, one after the other, have an equal part of each parameter."""
        offset = 0
        for shapes in self._shapes:
            for name, shape in shapes.items():
                each = -(-prod(shape) // len(vectors))
                yield name, [cut for rank in vectors for cut in _cut(rank, offset, each, f"{self._where}: {name}")]
                offset += each


def _cut(pieces: Sequence[torch.Tensor], start: int, count: int, where: str) -> list[torch.Tensor]:
    """Elements start to start + count of the vector that the pieces are, one after the other."""
    cuts, end = [], start + count
    for piece in pieces:
        size = piece.numel()
        if start < size and end > 0:
            cuts.append(piece[max(0, start) : min(size, end)])
        start, end = start - size, end - size
    if sum(cut.numel() for cut in cuts) != count:
        raise CheckpointCorrupted(f"{where}: is not whole in the files; they are damaged, or of several runs.")
    return cuts


def _tensor(cuts: Sequence[torch.Tensor], shape: Sequence[int]) -> LazyTensor:
    """The tensor of these consecutive elements, and maybe some more at their end."""

    def assemble() -> torch.Tensor:
        return torch.cat([*cuts])[: prod(shape)].view(*shape)

    return LazyTensor(cuts[0].dtype, tuple(shape), assemble)
