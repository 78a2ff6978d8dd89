"""Loading: any checkpoint on any number of ranks. Everything is verified before anything is applied.

    open      every rank reads the manifest, and all see the same one
    plan      which saved tensors this rank needs; what does not fit is listed, and nothing is read
    verify    each rank hashes its share of the files, in small blocks; objects' states are read; all agree
    apply     objects take their states: all, or none
    fill      this rank's ranges, straight into the live tensors; all agree

Up to `fill` a failure changes nothing. In it, it leaves a mix: the newest checkpoint before is then loaded as a whole,
or every rank raises StateIncomplete, and `Unfinished` says so until another load succeeds.

A sharded checkpoint and a full one differ in `layout.pieces` only: a full tensor is one piece in one file.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.checkpoint import apart, faults, folder, manifest, optimizers, state, tensors, values
from shardkit.checkpoint.fill import Saved, entry_of_parameter
from shardkit.checkpoint.folder import Skipped
from shardkit.checkpoint.layout import Entry, Index
from shardkit.checkpoint.manifest import Manifest
from shardkit.checkpoint.state import Live, Stateful, section_name
from shardkit.checkpoint.verify import Checkpoint, Files, check_headers, hash_file, open_checkpoint
from shardkit.distributed import random_state
from shardkit.distributed.control import ControlGroup, LostRank
from shardkit.errors import CheckpointCorrupted, CheckpointError, StateIncomplete
from shardkit.log import get_logger

logger = get_logger(__name__)

# A run may change its precision between a save and a load; its loss scale then has no place to go, or starts anew.
OPTIONAL = ("scaler",)


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    checkpoint: Checkpoint
    common: dict[str, Any]
    random_is_exact: bool
    skipped: tuple[Skipped, ...] = ()


@dataclass
class Unfinished:
    """What a load that failed had begun to write: `parts` of the live state, from the checkpoint `path`."""

    path: Path | None = None
    parts: set[str] = field(default_factory=set)

    def begin(self, path: Path, parts: set[str]) -> None:
        """From now on the live state is a mix."""
        self.path, self.parts = path, self.parts | parts

    def end(self) -> None:
        """It is whole again."""
        self.path, self.parts = None, set()


def open_together(path: Path, control: ControlGroup) -> Checkpoint:
    """As `open_checkpoint`, on all ranks, which must all see the same one. Collective."""
    found, problem, seen = None, None, None
    try:
        found = open_checkpoint(path) if control.rank == 0 else Checkpoint(path, manifest.read(path))
        seen = manifest.self_digest(path)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    trouble = control.decide([problem, seen], lambda answers: _not_seen_alike(path, answers))
    if trouble is not None:
        raise CheckpointError(trouble)
    assert found is not None
    return found


def _not_seen_alike(path: Path, answers: list[list[str | None]]) -> str | None:
    """What is wrong with what the ranks say: (problem, digest of the manifest)."""
    if answers[0][0] is not None:
        return f"checkpoint: {answers[0][0]}"
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    if problems:
        return f"checkpoint: {path}: rank 0 sees it, others do not: {'; '.join(problems[:3])}"
    if len({text for _, text in answers}) > 1:
        return f"checkpoint: {path}: ranks see different checkpoints; use storage that all ranks share."
    return None


def load(
    live: Live,
    path: Path,
    control: ControlGroup,
    *,
    verify: str = "digest",
    strict: bool = True,
    data_position: bool = True,
    unfinished: Unfinished | None = None,
) -> Loaded:
    """Put the checkpoint into the live objects. Collective; all ranks raise, or none does.

    CheckpointError: nothing was changed. StateIncomplete: part of the state was, and `unfinished` holds which.
    """
    checkpoint = open_together(path, control)
    how = _How(verify, strict, data_position, unfinished or Unfinished())
    return _load(live, checkpoint, control, how)


def load_newest(
    live: Live,
    root: Path,
    control: ControlGroup,
    *,
    verify: str = "digest",
    strict: bool = True,
    data_position: bool = True,
    unfinished: Unfinished | None = None,
) -> Loaded | None:
    """As `load`, from the newest checkpoint that is whole and undamaged; None where no step was ever saved. Collective.

    Falls back over damaged ones, and over those of which loading failed half-way, with a warning that counts the
    steps. A checkpoint that is undamaged but does not fit the model is an error, and no reason to fall back.
    """
    skipped: list[Skipped] = []
    how = _How(verify, strict, data_position, unfinished or Unfinished())
    for step, name in _candidates(root, control):
        try:
            checkpoint = open_together(root / name, control)
        except LostRank:
            raise
        except CheckpointError as error:
            skipped.append(Skipped(step, root / name, str(error)))
            continue
        try:
            loaded = _load(live, checkpoint, control, how)
        except (CheckpointCorrupted, StateIncomplete) as error:
            if isinstance(error.__cause__, LostRank):
                raise
            skipped.append(Skipped(step, root / name, str(error)))
            continue
        _warn_of(skipped, checkpoint, control)
        return replace(loaded, skipped=tuple(skipped))
    if skipped:
        raise _none_left(root, skipped, how.unfinished)
    return None


def _none_left(root: Path, skipped: list[Skipped], unfinished: Unfinished) -> CheckpointError:
    reasons = "\n".join(f"  step {item.step}: {item.reason}" for item in skipped[:5])
    if unfinished.parts:
        text = f"checkpoint: no checkpoint in {root} can be loaded, and the state is incomplete now:\n{reasons}"
        return StateIncomplete(text)
    return CheckpointError(
        f"checkpoint: every checkpoint in {root} is damaged; nothing is loaded, and nothing starts anew:\n{reasons}"
    )


def _candidates(root: Path, control: ControlGroup) -> list[tuple[int, str]]:
    """(step, name) of what may be loaded, as rank 0 sees it, in the order to try them. Collective."""

    def look() -> list[tuple[int, str]]:
        return [(found.step, found.path.name) for found in folder.candidates(root)] if control.rank == 0 else []

    attempt = control.attempt(look, tell=list, judge=lambda told: told[0])
    if attempt.failure:
        raise CheckpointError(attempt.failure)
    return attempt.verdict


def _warn_of(skipped: list[Skipped], checkpoint: Checkpoint, control: ControlGroup) -> None:
    if control.rank != 0:
        return
    step = checkpoint.manifest.step
    for item in skipped:
        lost = f"resuming at step {step}, {max(0, item.step - step)} steps are repeated"
        logger.warning("checkpoint: skipped step %d (%s); %s.", item.step, item.reason, lost)
    known = {item.step for item in skipped}
    above = [found.step for found in folder.steps(checkpoint.path.parent) if found.step > step]
    stale = sorted(set(above) - known)
    if stale:
        given_up = ", ".join(map(str, stale[:5]))
        logger.warning("checkpoint: resuming at step %d, which is newer than what is saved of step %s.", step, given_up)


@dataclass(frozen=True)
class _How:
    """How to load, and what an earlier load has left."""

    verify: str
    strict: bool
    data_position: bool
    unfinished: Unfinished


def _load(live: Live, checkpoint: Checkpoint, control: ControlGroup, how: _How) -> Loaded:
    here = f"checkpoint: {checkpoint.path}"
    if not how.data_position:
        live = replace(live, loaders={})
    before = "the state stays incomplete" if how.unfinished.parts else "nothing was changed"
    with ExitStack() as stack:
        with _Agreement(control, here, before) as step:
            files = stack.enter_context(Files(checkpoint))
            plan = _plan(live, checkpoint, control, how)
            step.problems = plan.problems
        saved = Saved(files, plan.own_rank, control.tick)
        with _Agreement(control, here, before):
            _verify(files, control, how.verify)
            objects = [*_object_states(live, plan, saved)]
            faults.reach("read", control.rank)
        _apply_objects(objects, control, here, before)
        _fill(live, plan, saved, control, here, how.unfinished)
    _warn_of_rank_0(plan, control)
    _restore_random(checkpoint, plan, control, has_loaders=bool(live.loaders))
    return Loaded(checkpoint, plan.common, plan.own is not None)


class _Agreement:
    """A block that either succeeds on all ranks or raises the same error on all."""

    def __init__(self, control: ControlGroup, here: str, outcome: str) -> None:
        self.control, self.here, self.outcome = control, here, outcome
        self.problems: list[str] = []

    def __enter__(self) -> "_Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if error is not None:
            self.problems = [str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"]
        lines, damaged = self.control.decide([self.problems, isinstance(error, CheckpointCorrupted)], _all_problems)
        if not lines:
            return
        text = "\n".join([f"{self.here}: cannot be loaded; {self.outcome}:", *(f"  {line}" for line in lines)])
        raise (CheckpointCorrupted if damaged else CheckpointError)(text) from error


def _all_problems(answers: list[Any]) -> tuple[list[str], bool]:
    """(the first lines of what is wrong on any rank, each once; whether anything is damaged)."""
    unique = list(dict.fromkeys(line for found, _ in answers for line in found))
    return unique[:8], any(corrupted for _, corrupted in answers)


# ---- plan ----


@dataclass
class _Plan:
    """What this rank is to be given."""

    common: dict[str, Any]
    own: dict[str, Any] | None
    """What this rank had for itself; None on another number of ranks."""
    own_rank: int | None = None
    left_out: set[tuple[int, str]] = field(default_factory=set)
    of_rank_0: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    weights: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    """(section, saved name, live tensor)."""
    parts: set[str] = field(default_factory=set)
    """Of the live state, what is written."""


def _plan(live: Live, checkpoint: Checkpoint, control: ControlGroup, how: _How) -> _Plan:
    common = checkpoint.json("state/common.json")
    own = None
    if checkpoint.manifest.world_size == control.world_size:
        own = checkpoint.json(f"state/rank-{control.rank:05d}.json")
        random_state.check(own["rng"])
    index, strict, plan = checkpoint.index, how.strict, _Plan(common, own)
    for number, model in enumerate(live.models):
        _plan_model(model, section_name("model", number), index, strict, plan)
    names = state.parameter_names(live.models)
    _take_own(plan, checkpoint, control.rank, _parameters(live, names), strict)
    for number, optimizer in enumerate(live.optimizers):
        _plan_optimizer(optimizer, number, names, index, strict, plan)
    if strict:
        plan.problems += _unmatched_objects(live, plan.common) + _unclaimed(live, index, plan.common)
        plan.problems += _other_kinds(live, plan.common)
        plan.problems += _unclaimed_loaders(live, plan.common) if how.data_position else []
    plan.problems += _unusable_positions(live, plan, checkpoint.manifest.world_size)
    left = sorted(how.unfinished.parts - plan.parts)
    if left:
        text = f"written by the load of {how.unfinished.path} that failed, and not in this checkpoint"
        plan.problems.append(f"{apart.labels_text(left)}: {text}")
    return plan


def _parameters(live: Live, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """The live parameters by the names that optimizers know them by."""
    return {names[id(p)]: p for model in live.models for p in model.parameters() if id(p) in names}


def _take_own(plan: _Plan, checkpoint: Checkpoint, rank: int, live: dict[str, torch.Tensor], strict: bool) -> None:
    """Put what this rank had for itself, or rank 0, where all ranks have the rest."""
    index = checkpoint.index
    found = apart.shared(checkpoint, plan.common, plan.own, rank, lambda fqn: _is_alike(index, fqn, live), strict)
    plan.common, plan.own_rank = found.common, found.own_rank
    plan.left_out, plan.of_rank_0 = found.left_out, found.of_rank_0
    plan.problems += found.problems


def _is_alike(index: Index, fqn: str, live: dict[str, torch.Tensor]) -> bool:
    """Whether this rank holds the part of a parameter that the same rank held when it was saved."""
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


def _plan_model(model: nn.Module, section: str, index: Index, strict: bool, plan: _Plan) -> None:
    if section not in index.sections:
        plan.problems += [_not_saved(section)] if strict else []
        return
    entries, aliases = index.sections[section], index.aliases[section]
    mine = state.model_tensors(model)
    saved = {*entries, *aliases}
    ties = state.tied_names(model, mine)
    if strict:
        missing = [name for name in mine if name not in saved and ties.get(name) not in saved]
        plan.problems += optimizers.listed(section, "in the model, not in the checkpoint", missing)
        unexpected = sorted(name for name in saved if name not in mine)
        plan.problems += optimizers.listed(section, "in the checkpoint, not in the model", unexpected)
    for name, tensor in mine.items():
        source = aliases.get(name, name)
        if source not in entries or name in ties:
            continue
        problem = _mismatch(entries[source], tensor)
        if problem:
            plan.problems.append(f"{section}: {name}: {problem}")
        else:
            plan.weights.append((section, source, tensor))
            plan.parts.add(f"{section}: {name}")


def _not_saved(section: str) -> str:
    return f"{section}: prepared now, and not in the checkpoint; load with strict=False to leave it as it is"


def _mismatch(entry: Entry, tensor: torch.Tensor) -> str | None:
    if entry.shape != tuple(tensor.shape):
        return f"shape {list(entry.shape)} in the checkpoint, {list(tensor.shape)} in the model"
    if entry.dtype != tensors.DTYPES.get(tensor.dtype):
        return f"dtype {entry.dtype} in the checkpoint, {tensors.DTYPES.get(tensor.dtype)} in the model"
    if not tensors.has_memory(tensor):
        return "has no values yet in the model (got a tensor on the meta device); prepare the model first"
    return None


def _plan_optimizer(
    optimizer: torch.optim.Optimizer, number: int, names: dict[int, str], index: Index, strict: bool, plan: _Plan
) -> None:
    section = section_name("optim", number)
    if section not in index.sections or number >= len(plan.common["optimizers"]):
        plan.problems += [_not_saved(section)] if strict else []
        return
    saved = plan.common["optimizers"][number]
    plan.problems += optimizers.problems_with(optimizer, names, section, saved, strict)
    plan.parts |= {f"{section}: {fqn}" for fqn in optimizers.parameters_by_name(optimizer, names, section)}


def _unmatched_objects(live: Live, common: dict[str, Any]) -> list[str]:
    missing = [name for name in live.objects if name not in (*common["objects"], *OPTIONAL)]
    unexpected = [name for name in common["objects"] if name not in (*live.objects, *OPTIONAL)]
    return [
        *optimizers.listed("objects", "registered now, not in the checkpoint", missing),
        *optimizers.listed("objects", "in the checkpoint, not registered now", unexpected),
    ]


def _other_kinds(live: Live, common: dict[str, Any]) -> list[str]:
    """Optimizers and schedules of another kind than was saved: each has settings that the other lacks."""
    pairs: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = []
    for number, (optimizer, saved) in enumerate(zip(live.optimizers, common["optimizers"], strict=False)):
        settings = saved["groups"][0]["settings"] if saved["groups"] else {}
        now = {**optimizer.defaults, **(optimizer.param_groups[0] if optimizer.param_groups else {})}
        pairs.append((section_name("optim", number), optimizer, settings, now))
    for name, item in live.objects.items():
        if name.startswith("scheduler.") and isinstance(saved := common["objects"].get(name), dict):
            pairs.append((name, getattr(item, "scheduler", item), saved, item.state_dict()))
    problems = []
    for name, now, saved, own in pairs:
        lost, new = sorted(saved.keys() - own.keys() - _ADDED), sorted(own.keys() - saved.keys() - _ADDED - {"params"})
        if saved and lost and new:
            problems.append(
                f"{name}: saved of another kind than {type(now).__name__} (it has {', '.join(lost[:3])} in place of "
                f"{', '.join(new[:3])}); prepare the kind that was saved, or load with strict=False"
            )
    return problems


# What schedules write into an optimizer's groups.
_ADDED = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}


def _unclaimed(live: Live, index: Index, common: dict[str, Any]) -> list[str]:
    """Whole models and optimizers of the checkpoint that nothing live takes: forgotten, or not prepared yet."""
    models = {name for name in index.sections if name.startswith("model")}
    models -= {section_name("model", number) for number in range(len(live.models))}
    unclaimed = [section_name("optim", n) for n in range(len(live.optimizers), len(common["optimizers"]))]
    return [
        f"{section}: in the checkpoint, and not prepared now; prepare it before loading, or load with strict=False"
        for section in [*sorted(models), *unclaimed]
    ]


def _unclaimed_loaders(live: Live, common: dict[str, Any]) -> list[str]:
    missing = [name for name in common["loaders"] if name not in live.loaders]
    if not missing:
        return []
    return [
        f"{', '.join(missing)}: its position is in the checkpoint, and it is not prepared now; "
        "prepare it before loading, or load with data_position=False"
    ]


def _positions(plan: _Plan) -> dict[str, Any]:
    """By loader, as saved."""
    return (plan.common if plan.own is None else plan.own)["loaders"]


def _unusable_positions(live: Live, plan: _Plan, saved_ranks: int) -> list[str]:
    """Positions in the data that mean nothing for the loaders that are prepared now."""
    problems, saved = [], _positions(plan)
    for name, loader in live.loaders.items():
        if name in saved:
            reason = loader.misfit(values.decode(saved[name], _no_tensor), saved_ranks)
            problems += [f"{name}: {reason}"] if reason else []
    return problems


def _no_tensor(name: str) -> Any:
    raise CheckpointCorrupted(f"state: a position in the data holds a tensor ({name}); it is damaged.")


# ---- verify ----


def _verify(files: Files, control: ControlGroup, verify: str) -> None:
    """Read this rank's share of the files once, and compare. Not collective."""
    faults.reach("verify", control.rank)
    for name, writer in _share(files.checkpoint.manifest, control):
        control.tick()
        if verify == "digest":
            hash_file(files, name, writer)
        else:
            check_headers(files, name, writer)


def _share(record: Manifest, control: ControlGroup) -> list[tuple[str, int]]:
    """The (file, writer) pairs that this rank hashes. Neighbours in rank are neighbours in most tensors, too: what a
    rank hashes is what it reads anyway, also where their number is another than at the save."""
    pairs = [(name, writer) for name, file in record.files.items() for writer in file.digests]
    return sorted(pair for pair in pairs if pair[1] * control.world_size // record.world_size == control.rank)


# ---- objects ----


def _object_states(live: Live, plan: _Plan, saved: Saved) -> Iterator[tuple[Stateful, Any]]:
    """What loaders, schedulers and registered objects are to load; tensors are read."""
    for name, item in live.objects.items():
        if name in plan.common["objects"]:
            yield item, _decoded(item, name, plan.common["objects"][name], saved)
    positions = _positions(plan)
    for name, loader in live.loaders.items():  # last: that they take their positions is known, so none is taken back
        if name in positions:
            yield loader, values.decode(positions[name], _no_tensor)


def _decoded(item: Stateful, name: str, encoded: Any, saved: Saved) -> Any:
    sharded: dict[str, DTensor] = {}

    def note(path: str, value: Any) -> str | None:
        if isinstance(value, DTensor):
            sharded[path] = value
        return path if isinstance(value, torch.Tensor) else None

    if any(True for _ in values.tensors_in(encoded)):
        values.encode(item.state_dict(), name, note)
    return values.decode(encoded, lambda path: saved.new("objects", path, sharded.get(path)))


def _apply_objects(states: list[tuple[Stateful, Any]], control: ControlGroup, here: str, before: str) -> None:
    """Give all objects their states, or none: user code may refuse, and what others took is then taken back."""
    applied: list[tuple[Stateful, Any]] = []
    try:
        with _Agreement(control, here, before):
            faults.reach("apply", control.rank)
            for item, wanted in states:
                applied.append((item, copy.deepcopy(item.state_dict())))
                item.load_state_dict(wanted)
    except CheckpointError:
        for item, before in reversed(applied):
            item.load_state_dict(before)
        raise


# ---- fill ----


def _fill(live: Live, plan: _Plan, saved: Saved, control: ControlGroup, here: str, unfinished: Unfinished) -> None:
    """Read weights and optimizer states into the live tensors. StateIncomplete on all ranks where it fails on one."""
    outcome = "part of the state is this checkpoint's now, and part is not; load another one before you go on"
    unfinished.begin(saved.files.checkpoint.path, plan.parts)
    try:
        with _Agreement(control, here, outcome):
            _fill_here(live, plan, saved, control.rank)
    except CheckpointError as error:
        text = f"{here}: {error}; {outcome}." if isinstance(error, LostRank) else str(error)
        raise StateIncomplete(text) from error
    unfinished.end()


def _fill_here(live: Live, plan: _Plan, saved: Saved, rank: int) -> None:
    for number, (section, name, tensor) in enumerate(plan.weights):
        if number == len(plan.weights) // 2:
            faults.reach("fill", rank)
        saved.fill(section, name, tensor)
    names = state.parameter_names(live.models)
    for number, (optimizer, told) in enumerate(zip(live.optimizers, plan.common["optimizers"], strict=False)):
        section = section_name("optim", number)
        if section in saved.index.sections:
            left_out = {fqn for which, fqn in plan.left_out if which == number}
            optimizers.restore(optimizer, names, section, told, saved, left_out)
    saved.files.refuse_changed()


def _warn_of_rank_0(plan: _Plan, control: ControlGroup) -> None:
    if plan.of_rank_0 and control.rank == 0:
        logger.warning(
            "checkpoint: %s: each rank that saved had its own; on another number of ranks all get that of rank 0.",
            apart.labels_text(plan.of_rank_0),
        )


def _restore_random(checkpoint: Checkpoint, plan: _Plan, control: ControlGroup, has_loaders: bool) -> None:
    """Last of all, so that nothing before it draws from the generators."""
    if plan.own is not None:
        random_state.restore(plan.own["rng"])
        return
    random_state.derive(plan.common["seed"], checkpoint.manifest.step, control.rank)
    if control.rank == 0:
        logger.warning(
            "checkpoint: saved by %d ranks, loading on %d: %s are exact; random generators are seeded anew from (seed, "
            "step, rank).",
            checkpoint.manifest.world_size,
            control.world_size,
            "weights, optimizer and data position" if has_loaders else "weights and optimizer",
        )
