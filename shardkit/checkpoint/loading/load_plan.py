"""Which parts of a checkpoint a load applies to the live objects, and mismatches between them. Reads only JSON."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardkit import values
from shardkit.checkpoint.files.layout import Index, TensorEntry, is_model, rank_state, section_name
from shardkit.checkpoint.files.state_json import extra_state, is_extra_state
from shardkit.checkpoint.files.verify import Checkpoint
from shardkit.checkpoint.loading import kinds
from shardkit.checkpoint.states import differences, optimizer_groups, optimizers, per_rank, state, tensors
from shardkit.checkpoint.states.differences import KEEP, LEAVE_OUT, Difference
from shardkit.checkpoint.states.fill import entry_of_parameter
from shardkit.checkpoint.states.state import Live
from shardkit.checkpoint.states.ties import Tie
from shardkit.distributed import custom_state, random_state
from shardkit.distributed.control import ControlGroup
from shardkit.distributed.custom_state import CustomState
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import is_composed
from shardkit.errors import CheckpointCorrupted
from shardkit.log import get_logger
from shardkit.storage.url import Place
from shardkit.wording import first_few

log = get_logger(__name__)

# A run may change its precision between a save and a load: the loss scale is then not loaded, or starts at its default.
OPTIONAL = ("scaler",)


@dataclass
class Unfinished:
    """The `parts` of the live state that a failed load may have overwritten, from the checkpoint `path`."""

    path: Place | None = None
    parts: set[str] = field(default_factory=set)

    def begin(self, path: Place, parts: set[str]) -> None:
        """Record that a load begins to overwrite the live state."""
        self.path, self.parts = path, self.parts | parts

    def end(self) -> None:
        """Record that the live state is complete again."""
        self.path, self.parts = None, set()


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load, and the state of an earlier failed load."""

    verify: str = "digest"
    strict: bool = True
    data_position: bool = True
    unfinished: Unfinished = field(default_factory=Unfinished)


@dataclass
class Plan:
    """What this rank loads."""

    common: dict[str, Any]
    own: dict[str, Any] | None
    """The per-rank state of this rank; None if the number of ranks changed."""
    own_rank: int | None = None
    left_out: set[tuple[int, str]] = field(default_factory=set)
    of_rank_0: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unlike: set[str] = field(default_factory=set)
    """Optimizers, schedulers and registered objects of another class than was saved. They are not loaded."""
    weights: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    """(section, saved name, live tensor)."""
    notes: list[str] = field(default_factory=list)
    """What is loaded and may be meant otherwise."""
    ties: list[Tie] = field(default_factory=list)
    """Tensors of the models that were saved as two."""
    custom: list[CustomState] = field(default_factory=list)
    """Of the models that load a part of their state by their own code."""
    parts: set[str] = field(default_factory=set)
    """The parts of the live state that are overwritten."""
    for_hooks: set[int] = field(default_factory=set)
    """Numbers of the models that are not in the checkpoint's sections; load hooks may load them."""

    def leave_out(self, number: int) -> None:
        """Do not load this model: a hook has loaded it."""
        section = section_name("model", number)
        self.weights = [one for one in self.weights if one[0] != section]
        self.ties = [one for one in self.ties if one.section != section]
        self.custom = [one for one in self.custom if one.section != section]
        self.parts = {part for part in self.parts if not part.startswith(f"{section}: ")}


def plan_of(live: Live, checkpoint: Checkpoint, control: ControlGroup, options: LoadOptions) -> Plan:
    common = checkpoint.common()
    own = None
    if checkpoint.manifest.world_size == control.world_size:
        own = checkpoint.of_rank(control.rank)
        _check_random(own["rng"], checkpoint, control.rank)
    index, plan = checkpoint.index, Plan(common, own)
    names = state.parameter_names(live.models, index)
    _take_own(plan, checkpoint, control.rank, _parameters(live, names))
    for number, model in enumerate(live.models):
        section = section_name("model", number)
        if section not in index.sections and live.take is not None:
            plan.for_hooks.add(number)
            continue
        _plan_model(model, section, index, plan)
    _compare_kinds(live, names, plan)
    for number, optimizer in enumerate(live.optimizers):
        _plan_optimizer(optimizer, number, names, index, plan)
    plan.differences += _unmatched_objects(live, plan.common) + _unclaimed(live, index, plan.common)
    plan.differences += _unclaimed_loaders(live, plan.common) if options.data_position else []
    plan.notes += _new_loaders(live, plan.common)
    plan.problems += [one.as_problem for one in plan.differences] if options.strict else []
    plan.problems += _unusable_positions(live, plan, checkpoint.manifest.world_size)
    left = sorted(options.unfinished.parts - plan.parts)
    if left:
        text = f"overwritten by the failed load of {options.unfinished.path}, and not in this checkpoint"
        plan.problems.append(f"{first_few(left, 5)}: {text}")
    return plan


def _check_random(state: dict[str, Any], checkpoint: Checkpoint, rank: int) -> None:
    """Raises CheckpointCorrupted where the states of the random generators cannot be restored."""
    try:
        random_state.check(state)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        where = checkpoint.where(rank_state(rank))
        raise CheckpointCorrupted(f"{where}: the states of random generators are damaged ({error!r}).") from error


def warn_of(plan: Plan, checkpoint: Checkpoint) -> None:
    """Log which parts of the state are not what was saved. For one rank, after the load."""
    if plan.of_rank_0:
        log.warning(
            "checkpoint: %s: each rank saved a different value; since the number of ranks has changed, all ranks load "
            "that of rank 0.",
            first_few(plan.of_rank_0, 5),
        )
    for note in plan.notes:
        log.warning("checkpoint: %s.", note)
    if plan.differences:
        lines = "".join(f"\n  {one.text}" for one in plan.differences)
        log.warning("checkpoint: %s: loaded with strict=False, without what differs:%s", checkpoint.path, lines)


def _parameters(live: Live, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """The live parameters by their names in optimizer states."""
    return {names[id(p)]: p for model in live.models for p in every_parameter(model) if id(p) in names}


def _take_own(plan: Plan, checkpoint: Checkpoint, rank: int, live: dict[str, torch.Tensor]) -> None:
    """Merge per-rank state into the state that all ranks share: this rank's, or rank 0's if the world size changed."""
    index = checkpoint.index
    found = per_rank.shared(checkpoint, plan.common, plan.own, rank, lambda fqn: _is_alike(index, fqn, live))
    plan.common, plan.own_rank = found.common, found.own_rank
    plan.left_out, plan.of_rank_0 = found.left_out, found.of_rank_0
    plan.differences += found.differences


def _is_alike(index: Index, fqn: str, live: dict[str, torch.Tensor]) -> bool:
    """Whether this rank holds the same part of a parameter as when it was saved."""
    saved = entry_of_parameter(index, fqn)
    if saved is None or fqn not in live:
        return False
    now = Index(index.kind, index.world_size)
    entry = tensors.entry_of(live[fqn], now, index.meshes[saved.mesh], fqn)
    return (now.meshes[entry.mesh], entry.placements, entry.shape) == (
        index.meshes[saved.mesh],
        saved.placements,
        saved.shape,
    )


def _plan_model(model: nn.Module, section: str, index: Index, plan: Plan) -> None:
    """Adds which saved tensor goes into which one of a model, and what does not fit."""
    if section not in index.sections:
        plan.differences.append(_not_saved(section))
        return
    entries, aliases = index.sections[section], index.aliases[section]
    mine, others = state.model_state(model)
    ties = state.tied_names(model, mine)
    saved = {*entries, *aliases, *plan.common["objects"].get(extra_state(section), {})}
    plan.differences += _unmatched_names(model, section, saved, [*mine, *others], ties)
    for name, first in ties.items():
        both = aliases.get(first, first), aliases.get(name, name)
        if {*both} <= entries.keys() and both[0] != both[1]:
            plan.ties.append(Tie(section, (first, name), both, mine[name]))
    custom = custom_state.CustomState(model, section, values=others)
    detached = custom_state.detached_names(model, mine)
    unlike = []
    for name, source in _sources(mine, ties, entries, aliases).items():
        tensor, entry = mine[name], entries[source]
        is_resized = entry.shape != tuple(tensor.shape) and custom_state.may_resize(model, name)
        if name in detached or is_resized:
            custom.tensors[name] = (source, tensor)
        elif difference := _mismatch(entry, tensor):
            unlike.append(f"{name}: {difference}")
        elif problem := _not_ready(tensor):
            plan.problems.append(f"{section}: {name}: {problem}")
        else:
            plan.weights.append((section, source, tensor))
            plan.parts.add(f"{section}: {name}")
    if unlike:
        plan.problems.append(f"{section}: {first_few(unlike, 3)}; {_OF_ANOTHER_FORM}")
    if custom.tensors or others or custom_state.is_customized(model):
        plan.custom.append(custom)


def _sources(
    names: Iterable[str], ties: Mapping[str, str], saved: Container[str], aliases: Mapping[str, str]
) -> dict[str, str]:
    """{first name of a tensor of the model: the name of the saved tensor for it}; any of its names may be saved."""
    found: dict[str, str] = {}
    for name in names:
        if (source := aliases.get(name, name)) in saved:
            found.setdefault(ties.get(name, name), source)
    return found


def _unmatched_names(
    model: nn.Module, section: str, saved: set[str], present: list[str], ties: dict[str, str]
) -> list[Difference]:
    """What only the model has, and only the checkpoint. One name of a tied tensor is enough."""
    there = {ties.get(name, name) for name in saved}
    missing = [name for name in present if ties.get(name, name) not in there]
    unexpected = sorted(saved.difference(present))
    found = differences.listed(section, "in the model, not in the checkpoint", missing, KEEP)
    found += differences.listed(section, "in the checkpoint, not in the model", unexpected, LEAVE_OUT)
    if missing and unexpected and custom_state.has_load_hooks(model):
        found.append(Difference(f"{section}: its load hooks do not see the names of a checkpoint", _BY_HOOKS))
    return found


_BY_HOOKS = (
    "if they rename tensors of older ones, run shardkit checkpoint merge CHECKPOINT -o FOLDER, and start from its "
    "weights, with a new optimizer, by prepare(model, ..., weights=FOLDER)"
)


_OF_ANOTHER_FORM = (
    "prepare the model as it was saved (mixed_precision leaves its dtype), or start from changed weights with a new "
    "optimizer: `shardkit checkpoint merge CHECKPOINT -o FOLDER` writes them for plain torch"
)


def _not_saved(section: str) -> Difference:
    return Difference(f"{section}: prepared in this run, but not in the checkpoint", KEEP)


def _mismatch(entry: TensorEntry, tensor: torch.Tensor) -> str | None:
    if entry.shape != tuple(tensor.shape):
        return f"shape {list(entry.shape)} in the checkpoint, {list(tensor.shape)} in the model"
    if entry.dtype != tensors.DTYPES.get(tensor.dtype):
        return f"dtype {entry.dtype} in the checkpoint, {tensors.DTYPES.get(tensor.dtype)} in the model"
    return None


def _not_ready(tensor: torch.Tensor) -> str | None:
    if is_composed(tensor):
        return f"is quantized in the model (got a {type(tensor).__name__}); load the checkpoint before quantizing"
    if not tensors.has_memory(tensor):
        return "has no values in the model yet (got a tensor on the meta device); prepare the model first"
    if tensor.numel() and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "repeats its values in the model (got a view made by expand), so none can be loaded; give it a clone()"
    return None


def _plan_optimizer(
    optimizer: torch.optim.Optimizer, number: int, names: dict[int, str], index: Index, plan: Plan
) -> None:
    section = section_name("optim", number)
    if section not in index.sections or number >= len(plan.common["optimizers"]):
        plan.differences.append(_not_saved(section))
        return
    if section in plan.unlike:
        return
    saved = plan.common["optimizers"][number]
    plan.problems += optimizer_groups.unmatched_groups(optimizer, names, saved["groups"], section)
    plan.differences += optimizer_groups.unmatched_parameters(optimizer, names, saved["groups"], section)
    plan.differences += optimizer_groups.parted_groups(optimizer, names, saved["groups"], section)
    plan.parts |= {f"{section}: {fqn}" for fqn in optimizers.parameters_by_name(optimizer, names, section)}


def _unmatched_objects(live: Live, common: dict[str, Any]) -> list[Difference]:
    of_models = [name for name in common["objects"] if is_extra_state(name)]  # see `_plan_model`
    missing = [name for name in live.objects if name not in (*common["objects"], *OPTIONAL)]
    unexpected = [name for name in common["objects"] if name not in (*live.objects, *OPTIONAL, *of_models)]
    return [
        *differences.listed("objects", "registered in this run, not in the checkpoint", missing, KEEP),
        *differences.listed("objects", "in the checkpoint, not registered in this run", unexpected, LEAVE_OUT),
    ]


def _compare_kinds(live: Live, names: dict[int, str], plan: Plan) -> None:
    classes = (plan.common if plan.own is None else plan.own).get("classes", {})
    found = kinds.compare(live, plan.common, classes, names)
    plan.unlike |= found.unlike
    plan.differences += found.differences
    plan.notes += found.notes


def _unclaimed(live: Live, index: Index, common: dict[str, Any]) -> list[Difference]:
    """Models and optimizers in the checkpoint that are not prepared in this run."""
    models = {name for name in index.sections if is_model(name)}
    models -= {section_name("model", number) for number in range(len(live.models))}
    unclaimed = [section_name("optim", n) for n in range(len(live.optimizers), len(common["optimizers"]))]
    return [
        Difference(
            f"{section}: in the checkpoint, but not prepared", "prepare it before loading, or load with strict=False"
        )
        for section in [*sorted(models), *unclaimed]
    ]


def _unclaimed_loaders(live: Live, common: dict[str, Any]) -> list[Difference]:
    """Of loaders that are trained on. Others begin at their start anyway; an evaluation may make one in each call."""
    purposes = {name: values.decode(saved, no_tensor).get("purpose") for name, saved in common["loaders"].items()}
    trained = {name for name, purpose in purposes.items() if purpose == "training"} or set(purposes)
    missing = [name for name in purposes if name in trained - set(live.loaders)]
    if not missing:
        return []
    return [
        Difference(
            f"{', '.join(missing)}: the checkpoint has its position, but it is not prepared",
            "prepare it before loading, or load with data_position=False",
        )
    ]


def _new_loaders(live: Live, common: dict[str, Any]) -> list[str]:
    new = [name for name in live.loaders if name not in common["loaders"]]
    if not (new and common["loaders"]):
        return []
    return [
        f"{', '.join(new)}: the checkpoint has no position of it, so it begins at its start (positions are matched by "
        "the order in which loaders were prepared; prepare a new one last)"
    ]


def positions(plan: Plan) -> dict[str, Any]:
    """The saved positions by loader."""
    return (plan.common if plan.own is None else plan.own)["loaders"]


def _unusable_positions(live: Live, plan: Plan, saved_ranks: int) -> list[str]:
    """Saved positions that do not match the prepared loaders."""
    problems, saved = [], positions(plan)
    for name, loader in live.loaders.items():
        if name in saved:
            reason = loader.misfit(values.decode(saved[name], no_tensor), saved_ranks)
            problems += [f"{name}: {reason}"] if reason else []
    return problems


def no_tensor(name: str) -> Any:
    raise CheckpointCorrupted(f"state: a position in the data contains a tensor ({name}); the file is damaged.")
