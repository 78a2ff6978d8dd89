"""Loading: any checkpoint on any number of ranks. Everything is verified before anything is applied.

    open      every rank reads the manifest, and all must read the same one
    plan      which saved tensors this rank needs; mismatches are listed; no tensor is read
    verify    each rank hashes its share of the files, in small blocks; the states of objects are read; all agree
    apply     objects load their states: all of them, or none
    fill      each rank reads its parts directly into the live tensors; all agree

Before `fill` a failure changes nothing. A failure in `fill` leaves a mix of two states: then the next older checkpoint
is loaded, or every rank raises StateIncomplete, and `Unfinished` records that until another load succeeds.

A sharded checkpoint and a full one differ only in `layout.pieces`: in a full one each tensor is one piece in one file.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from shardkit import values
from shardkit.checkpoint import faults
from shardkit.checkpoint.files import state_json
from shardkit.checkpoint.files.folder import SkippedFolder
from shardkit.checkpoint.files.layout import Index, section_name
from shardkit.checkpoint.files.manifest import Manifest
from shardkit.checkpoint.files.verify import Checkpoint, Files, Span, check_headers, hash_file
from shardkit.checkpoint.loading.load_plan import LoadOptions, Plan, Unfinished, no_tensor, plan_of, positions, warn_of
from shardkit.checkpoint.loading.seen import Listed, candidates, open_together, without_deleted
from shardkit.checkpoint.loading.spread_weights import NO_WEIGHTS, Weights
from shardkit.checkpoint.states import optimizer_groups, optimizer_loading, state, ties
from shardkit.checkpoint.states.differences import KEEP, Difference
from shardkit.checkpoint.states.fill import Saved
from shardkit.checkpoint.states.state import Live, Stateful
from shardkit.distributed import custom_state, random_state
from shardkit.distributed.control import ControlGroup, LostRank
from shardkit.distributed.custom_state import CustomState
from shardkit.distributed.tensors import local_part, outside_inference_mode
from shardkit.errors import CheckpointCorrupted, CheckpointError, CheckpointUnreachable, StateIncomplete
from shardkit.log import get_logger
from shardkit.storage.url import Place
from shardkit.wording import counted

log = get_logger(__name__)


@dataclass(frozen=True)
class LoadedState:
    """What was loaded."""

    checkpoint: Checkpoint
    common: dict[str, Any]


def load(live: Live, path: Place, control: ControlGroup, options: LoadOptions) -> LoadedState:
    """Load the checkpoint into the live objects. Collective; all ranks raise, or none does.

    CheckpointError: nothing was changed; CheckpointMissing: no rank finds it. StateIncomplete: part of the state was
    changed; `options.unfinished` has the parts.
    """
    return _load(live, open_together(path, control), control, options)


def load_newest(live: Live, root: Place, control: ControlGroup, options: LoadOptions) -> LoadedState | None:
    """As `load`, from the newest checkpoint that is complete and undamaged; None if there is no checkpoint. Collective.

    Skips checkpoints that are damaged, or whose load failed in the middle, with a warning that counts the lost steps. A
    checkpoint that is undamaged but does not match the model raises an error. Where one is deleted meanwhile, the run
    that saves there may have newer ones: they are tried next.
    """
    skipped: list[SkippedFolder] = []
    listed = left = candidates(root, control)
    while left:
        (step, name), *left = left
        try:
            checkpoint = open_together(root / name, control)
        except (LostRank, CheckpointUnreachable):
            raise
        except CheckpointError as error:
            skipped.append(SkippedFolder(step, root / name, str(error)))
            listed, left = without_deleted(root / name, listed, left, control)
            continue
        try:
            loaded = _load(live, checkpoint, control, options)
        except (CheckpointCorrupted, StateIncomplete) as error:
            if isinstance(error.__cause__, LostRank):
                raise
            skipped.append(SkippedFolder(step, root / name, str(error)))
            listed, left = without_deleted(root / name, listed, left, control)
            continue
        _warn_of(skipped, listed, checkpoint, control)
        return loaded
    if skipped:
        raise _none_left(root, skipped, options.unfinished)
    return None


def _none_left(root: Place, skipped: list[SkippedFolder], unfinished: Unfinished) -> CheckpointError:
    reasons = "\n".join(f"  step {item.step}: {item.reason}" for item in skipped[:5])
    if unfinished.parts:
        text = f"checkpoint: no checkpoint in {root} can be loaded, and the state is now incomplete:\n{reasons}"
        return StateIncomplete(text)
    return CheckpointError(
        f"checkpoint: no checkpoint in {root} can be loaded; nothing was changed, and training does not restart from "
        f"step 0:\n{reasons}"
    )


def _warn_of(skipped: list[SkippedFolder], listed: Listed, checkpoint: Checkpoint, control: ControlGroup) -> None:
    if control.rank != 0:
        return
    step = checkpoint.manifest.step
    for item in skipped:
        if (item.step, item.path.name) not in listed:  # the run that saves there has deleted it
            continue
        again = max(0, item.step - step)
        lost = f"resuming at step {step}, {counted(again, 'step is', 'steps are')} repeated"
        log.warning("checkpoint: skipped step %d (%s); %s.", item.step, item.reason, lost)
    above = {number for number, _ in listed if number > step}
    if stale := sorted(above - {item.step for item in skipped}):
        log.warning(
            "checkpoint: resuming at step %d, which was saved after the checkpoints of the higher steps %s.",
            step,
            ", ".join(map(str, stale[:5])),
        )


@outside_inference_mode()
def _load(live: Live, checkpoint: Checkpoint, control: ControlGroup, options: LoadOptions) -> LoadedState:
    here = f"checkpoint: {checkpoint.path}"
    if not options.data_position:
        live = replace(live, loaders={})
    unchanged = "the state is still incomplete" if options.unfinished.parts else "nothing was changed"
    with ExitStack() as stack:
        with _Agreement(control, here, unchanged) as step:
            files = stack.enter_context(Files(checkpoint))
            plan = plan_of(live, checkpoint, control, options)
            step.problems = plan.problems
        saved = Saved(files, plan.own_rank, control.work)
        control.work.expect(_bytes_to_read(plan, saved.index))
        with _Agreement(control, here, unchanged) as step:
            _verify(files, control, options.verify)
            objects = [*_object_states(live, plan, saved)]
            plan.differences += (parted := ties.parted(plan.ties, saved))
            step.problems = [one.as_problem for one in parted] if options.strict else []
            faults.reach("read", control.rank)
        if live.take is not None:
            assert isinstance(checkpoint.path, Path), "load hooks with a store were refused before"
            _let_hooks_load(live.take, checkpoint.path, plan, control, options.strict)
        _apply_objects(objects, control, here, unchanged)
        _fill(live, plan, saved, control, here, options)
    if control.rank == 0:
        warn_of(plan, checkpoint)
    _restore_random(checkpoint, plan, control, has_loaders=bool(live.loaders))
    return LoadedState(checkpoint, plan.common)


class _Agreement:
    """A block that either succeeds on all ranks or raises the same error on all."""

    def __init__(self, control: ControlGroup, here: str, outcome: str) -> None:
        self.control, self.here, self.outcome = control, here, outcome
        self.problems: list[str] = []
        self.place = ""  # begins the text of another error than a CheckpointError

    def __enter__(self) -> "_Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if error is not None:
            is_told = isinstance(error, CheckpointError)
            self.problems = [str(error) if is_told else f"{self.place}{type(error).__name__}: {error}"]
        lines, damaged = self.control.decide([self.problems, isinstance(error, CheckpointCorrupted)], _all_problems)
        if not lines:
            return
        text = "\n".join([f"{self.here}: cannot be loaded; {self.outcome}:", *(f"  {line}" for line in lines)])
        raise (CheckpointCorrupted if damaged else CheckpointError)(text) from error


def _all_problems(answers: list[Any]) -> tuple[list[str], bool]:
    """(the first problems of all ranks without duplicates; whether anything is damaged)."""
    unique = list(dict.fromkeys(line for found, _ in answers for line in found))
    return unique[:8], any(corrupted for _, corrupted in answers)


# ---- verify ----


def _verify(files: Files, control: ControlGroup, verify: str) -> None:
    """Read this rank's share of the files once, and compare the digests. Not collective."""
    faults.reach("verify", control.rank)

    def count(span: Span) -> None:
        control.work(span.bytes)

    record, share = files.checkpoint.manifest, _share(files.checkpoint.manifest, control)
    if verify == "digest":
        control.work.expect(
            sum(record.every_file[name].bytes // len(record.every_file[name].digests) for name, _ in share)
        )
    for name, writer in share:
        control.work()
        if verify == "digest":
            hash_file(files, name, writer, count)
        else:
            check_headers(files, name, writer)


def _share(record: Manifest, control: ControlGroup) -> list[tuple[str, int]]:
    """The (file, writer) pairs that this rank hashes: those of the ranks whose shards it mostly reads anyway, also if
    the number of ranks has changed."""
    pairs = [(name, writer) for name, file in record.every_file.items() for writer in file.digests]
    return sorted(pair for pair in pairs if pair[1] * control.world_size // record.world_size == control.rank)


# ---- objects ----


def _object_states(live: Live, plan: Plan, saved: Saved) -> Iterator[tuple[str, Stateful, Any]]:
    """(name, object, state to load) for schedulers, registered objects and loaders; reads the tensors in the states."""
    weights = Weights.of(live.models, saved.index)
    names, schedulers = state.parameter_names(live.models, saved.index), live.schedulers()
    for name, item in live.objects.items():
        if name in plan.common["objects"] and name not in plan.unlike:
            found = _decoded(item.state_dict, name, plan.common["objects"][name], saved, weights)
            if name in schedulers:
                found = optimizer_groups.schedule_state(schedulers[name], found, live.optimizers, names, plan.common)
            yield name, item, found
    saved_positions = positions(plan)
    for name, loader in live.loaders.items():  # last: they were checked before, so they do not fail
        if name in saved_positions:
            yield name, loader, values.decode(saved_positions[name], no_tensor)


def _decoded(present: Callable[[], Any], name: str, encoded: Any, saved: Saved, weights: Weights = NO_WEIGHTS) -> Any:
    """A saved state, with the types of the present state, and tensors sharded as its are, or as one of the weights."""
    here, sharded = present(), dict[str, DTensor]()
    taken: set[str] = set()

    def note(path: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        path = values.unique_name(path, taken)
        taken.add(path)
        if isinstance(value, DTensor):
            sharded[path] = value
        return path

    def load(path: str) -> torch.Tensor:
        entry = saved.entry("objects", path)
        like = sharded.get(path) if path in taken else weights.like(path, entry)
        return saved.new("objects", path, like)

    if any(True for _ in values.tensors_in(encoded)):
        values.encode(here, name, note)
    found = values.decode(encoded, load)
    return values.as_present(found, here)


def _apply_objects(states: list[tuple[str, Stateful, Any]], control: ControlGroup, here: str, unchanged: str) -> None:
    """Load the states of all objects, or of none: if user code raises, the objects loaded so far are restored."""
    applied: list[tuple[Stateful, Any]] = []
    try:
        with _Agreement(control, here, unchanged) as step:
            faults.reach("apply", control.rank)
            for name, item, wanted in states:
                step.place = f"{name}: its present state cannot be kept meanwhile: "
                applied.append((item, _copied(item.state_dict())))
                step.place = f"{name}: load_state_dict refuses the saved state: "
                item.load_state_dict(wanted)
    except CheckpointError:
        for item, before in reversed(applied):
            item.load_state_dict(before)
        raise


def _copied(state: Any) -> Any:
    """A copy of an object's state. A tensor may still have its graph, as the smallest loss so far."""
    return copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.detach, state))


# ---- the user's hooks ----


def _let_hooks_load(
    take: Callable[[Path], set[int]], path: Path, plan: Plan, control: ControlGroup, is_strict: bool
) -> None:
    """Run the load hooks; models that they load are not loaded here. Raises CheckpointError on all ranks if a hook
    fails, or if the hooks load different models on different ranks."""
    outcome = "models that load hooks have loaded so far stay changed; load a checkpoint before you continue"
    taken: set[int] = set()
    with _Agreement(control, f"checkpoint: {path}", outcome) as step:
        taken = take(path)
        missing = [
            Difference(
                f"{section_name('model', number)}: a save hook removed it from `weights`, so the checkpoint lacks it, "
                "and no load hook removed it from `models`",
                f"register a load hook that loads it, or {KEEP}",
            )
            for number in sorted(plan.for_hooks - taken)
        ]
        plan.differences += missing
        step.problems = [one.as_problem for one in missing] if is_strict else []
    if not control.decide(sorted(taken), lambda answers: all(one == answers[0] for one in answers)):
        raise CheckpointError(
            f"checkpoint: {path}: load hooks loaded different models on different ranks (got models {sorted(taken)} on "
            f"rank {control.rank}); load the same on all ranks: {outcome}."
        )
    for number in taken:
        plan.leave_out(number)


# ---- fill ----


def _fill(live: Live, plan: Plan, saved: Saved, control: ControlGroup, here: str, options: LoadOptions) -> None:
    """Read weights and optimizer states into the live tensors. If it fails on one rank, all raise StateIncomplete."""
    unfinished = options.unfinished
    outcome = "only part of the state was loaded; load another checkpoint before you continue"
    unfinished.begin(saved.files.checkpoint.path, plan.parts)
    try:
        with _Agreement(control, here, outcome):
            _fill_here(live, plan, saved, control.rank, options.strict)
    except CheckpointError as error:
        text = f"{here}: {error}; {outcome}." if isinstance(error, LostRank) else str(error)
        raise StateIncomplete(text) from error
    unfinished.end()


def _bytes_to_read(plan: Plan, index: Index) -> int:
    """An estimate of the bytes that this rank reads: its share of the weights, applied to all tensors."""
    held = whole = 0
    for _, _, tensor in plan.weights:
        held += local_part(tensor).numel() * tensor.element_size()
        whole += tensor.numel() * tensor.element_size()
    return sum(entry.bytes for section in index.sections.values() for entry in section.values()) * held // max(1, whole)


def _fill_here(live: Live, plan: Plan, saved: Saved, rank: int, is_strict: bool) -> None:
    for number, (section, name, tensor) in enumerate(plan.weights):
        if number == len(plan.weights) // 2:
            faults.reach("fill", rank)
        saved.fill(section, name, tensor)
    for custom in plan.custom:
        custom_state.load(custom.model, _custom_values(custom, plan, saved), is_strict)
    names = state.parameter_names(live.models, saved.index)
    for number, (optimizer, encoded) in enumerate(zip(live.optimizers, plan.common["optimizers"], strict=False)):
        section = section_name("optim", number)
        if section in saved.index.sections and section not in plan.unlike:
            left_out = {fqn for which, fqn in plan.left_out if which == number}
            optimizer_loading.restore(optimizer, names, section, encoded, saved, left_out)
    saved.files.refuse_changed()


def _custom_values(custom: CustomState, plan: Plan, saved: Saved) -> dict[str, Any]:
    """What a model's own code loads, by name."""
    name = state_json.extra_state(custom.section)
    encoded = plan.common["objects"].get(name)
    found = {} if encoded is None else _decoded(lambda: dict(custom.values), name, encoded, saved)
    for name, (source, like) in custom.tensors.items():
        found[name] = saved.new(custom.section, source, like, local_part(like).device)
    return found


def _restore_random(checkpoint: Checkpoint, plan: Plan, control: ControlGroup, has_loaders: bool) -> None:
    """Restore the random generators. Must be the last step, so that nothing draws from them afterwards."""
    if plan.own is not None:
        random_state.restore(plan.own["rng"])
        return
    random_state.derive_together(plan.common["seed"], checkpoint.manifest.step, control)
    if control.rank == 0:
        log.warning(
            "checkpoint: saved by %s, loading on %d: %s are restored exactly; random generators are seeded from "
            "(seed, step, rank), alike on all ranks where they were.",
            counted(checkpoint.manifest.world_size, "rank"),
            control.world_size,
            "weights, optimizer and data position" if has_loaders else "weights and optimizer",
        )
