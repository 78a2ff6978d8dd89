"""Loading: any checkpoint on any number of ranks. Everything is read aside and verified before anything is applied.

    open       every rank reads the manifest, and all see the same one
    want       which saved ranges overlap what this rank holds; what does not fit is listed, and nothing is read
    read       this rank's ranges into host memory; each rank hashes its share of the files; all agree
    apply      into the live objects: all of it, or none

A sharded checkpoint and a full one differ in `layout.pieces` only: a full tensor is one piece in one file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint import disk, faults, folder, layout, manifest, tensors, values
from shardkit.checkpoint.folder import Skipped
from shardkit.checkpoint.layout import Box, Stored
from shardkit.checkpoint.manifest import Manifest
from shardkit.checkpoint.state import Live, Stateful, Target, apply_objects, apply_tensors, take_back, wanted
from shardkit.checkpoint.verify import Checkpoint, Files, Span, hash_file, open_checkpoint
from shardkit.distributed import random_state
from shardkit.distributed.control import ControlGroup, LostRank
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    checkpoint: Checkpoint
    common: dict[str, Any]
    random_is_exact: bool
    skipped: tuple[Skipped, ...] = ()


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
) -> Loaded:
    """Put the checkpoint into the live objects, entirely or not at all. Collective; all ranks raise, or none does."""
    checkpoint = open_together(path, control)
    return _load(live, checkpoint, control, verify, strict, data_position)


def load_newest(
    live: Live,
    root: Path,
    control: ControlGroup,
    *,
    verify: str = "digest",
    strict: bool = True,
    data_position: bool = True,
) -> Loaded | None:
    """As `load`, from the newest checkpoint that is whole and undamaged; None where no step was ever saved. Collective.

    Falls back over damaged ones with a warning that counts the steps. A checkpoint that is undamaged but does not fit
    the model is an error, and no reason to fall back.
    """
    skipped: list[Skipped] = []
    for step, name in _candidates(root, control):
        try:
            checkpoint = open_together(root / name, control)
        except LostRank:
            raise
        except CheckpointError as error:
            skipped.append(Skipped(step, root / name, str(error)))
            continue
        try:
            loaded = _load(live, checkpoint, control, verify, strict, data_position)
        except CheckpointCorrupted as error:
            skipped.append(Skipped(step, root / name, str(error)))
            continue
        _warn_of(skipped, checkpoint, control)
        return replace(loaded, skipped=tuple(skipped))
    if skipped:
        reasons = "\n".join(f"  step {item.step}: {item.reason}" for item in skipped[:5])
        text = (
            f"checkpoint: every checkpoint in {root} is damaged; nothing is loaded, and nothing starts anew:\n{reasons}"
        )
        raise CheckpointError(text)
    return None


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


def _load(
    live: Live, checkpoint: Checkpoint, control: ControlGroup, verify: str, strict: bool, data_position: bool
) -> Loaded:
    here = f"checkpoint: {checkpoint.path}"
    if not data_position:
        live = Live(live.models, live.optimizers, live.objects, {}, live.seed)
    same_world = checkpoint.manifest.world_size == control.world_size
    with _Agreement(control, here) as step:
        common = checkpoint.json("state/common.json")
        own = checkpoint.json(f"state/rank-{control.rank:05d}.json") if same_world else None
        if own is not None:
            random_state.check(own["rng"])
        plan = wanted(live, checkpoint.index, common, strict)
        step.problems = plan.problems
        if strict and data_position:
            step.problems += _unclaimed_loaders(live, common)
        step.problems += _unusable_positions(live, common if own is None else own, checkpoint.manifest.world_size)
    with _Agreement(control, here):
        read_targets(checkpoint, plan.targets.values(), control, verify)
    _apply(live, plan.targets, common, own, control, here)
    _restore_random(checkpoint, common, own, control, has_loaders=bool(live.loaders))
    return Loaded(checkpoint, common, own is not None)


def _unclaimed_loaders(live: Live, common: dict[str, Any]) -> list[str]:
    missing = [name for name in common["loaders"] if name not in live.loaders]
    if not missing:
        return []
    return [
        f"{', '.join(missing)}: its position is in the checkpoint, and it is not prepared now; "
        "prepare it before loading, or load with data_position=False"
    ]


def _unusable_positions(live: Live, saved: dict[str, Any], saved_ranks: int) -> list[str]:
    """Positions in the data that mean nothing for the loaders that are prepared now."""
    problems = []
    for name, loader in live.loaders.items():
        if name in saved["loaders"]:
            reason = loader.misfit(values.decode(saved["loaders"][name], _no_tensor), saved_ranks)
            problems += [f"{name}: {reason}"] if reason else []
    return problems


def _no_tensor(name: str) -> Any:
    raise CheckpointCorrupted(f"state: a position in the data holds a tensor ({name}); it is damaged.")


def _apply(
    live: Live,
    targets: dict[tuple[str, str], Target],
    common: dict[str, Any],
    own: dict[str, Any] | None,
    control: ControlGroup,
    here: str,
) -> None:
    """Everything, or nothing: what user code can refuse comes first, and is taken back on all ranks if one refuses."""
    applied: list[tuple[Stateful, Any]] = []
    try:
        with _Agreement(control, here):
            faults.reach("apply", control.rank)
            apply_objects(live, targets, common, own, applied)
    except CheckpointError:
        take_back(applied)
        raise
    apply_tensors(live, targets, common)


class _Agreement:
    """A block that either succeeds on all ranks or raises the same CheckpointError on all."""

    def __init__(self, control: ControlGroup, here: str) -> None:
        self.control, self.here = control, here
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
        text = "\n".join([f"{self.here}: cannot be loaded; nothing was changed:", *(f"  {line}" for line in lines)])
        raise (CheckpointCorrupted if damaged else CheckpointError)(text) from error


def _all_problems(answers: list[Any]) -> tuple[list[str], bool]:
    """(the first lines of what is wrong on any rank, each once; whether anything is damaged)."""
    unique = list(dict.fromkeys(line for found, _ in answers for line in found))
    return unique[:8], any(corrupted for _, corrupted in answers)


def _restore_random(
    checkpoint: Checkpoint, common: dict[str, Any], own: dict[str, Any] | None, control: ControlGroup, has_loaders: bool
) -> None:
    """Last of all, so that nothing before it draws from the generators."""
    if own is not None:
        random_state.restore(own["rng"])
        return
    random_state.derive(common["seed"], checkpoint.manifest.step, control.rank)
    if control.rank == 0:
        logger.warning(
            "checkpoint: saved by %d ranks, loading on %d: %s are exact; random generators are seeded anew from (seed, "
            "step, rank).",
            checkpoint.manifest.world_size,
            control.world_size,
            "weights, optimizer and data position" if has_loaders else "weights and optimizer",
        )


def verify_together(checkpoint: Checkpoint, control: ControlGroup, verify: str = "digest") -> None:
    """Check every byte, each rank its share of the files. Collective; CheckpointCorrupted names what differs."""
    with _Agreement(control, f"checkpoint: {checkpoint.path}"):
        if verify == "digest":
            read_targets(checkpoint, [], control, verify)


def read_targets(checkpoint: Checkpoint, targets: Iterable[Target], control: ControlGroup, verify: str) -> None:
    """Fill the targets' host memory, and hash this rank's share of the files on the way. Not collective."""
    faults.reach("verify", control.rank)
    with Files(checkpoint) as files:
        by_place: dict[tuple[str, str], list[Target]] = {}
        for target in targets:
            by_place.setdefault((target.section, target.name), []).append(target)
        done: set[tuple[int, Box]] = set()
        if verify == "digest":
            for name, writer in _share(checkpoint.manifest, control):
                control.tick()
                done |= _hash(files, name, writer, by_place)
        faults.reach("read", control.rank)
        for group in by_place.values():
            for target in group:
                control.tick()
                _read(files, target, done)


def _share(record: Manifest, control: ControlGroup) -> list[tuple[str, int]]:
    """The (file, writer) pairs that this rank hashes. Neighbours in rank are neighbours in most tensors, too: what a
    rank hashes is what it reads anyway, also where their number is another than at the save."""
    pairs = [(name, writer) for name, file in record.files.items() for writer in file.digests]
    return sorted(pair for pair in pairs if pair[1] * control.world_size // record.world_size == control.rank)


def _hash(files: Files, name: str, writer: int, by_place: dict[tuple[str, str], list[Target]]) -> set[tuple[int, Box]]:
    """Hash what a rank wrote into a file; what this rank wants of it is read where it is wanted: (target, box)."""
    section, filled = name.split("/")[0], set()

    def take(span: Span) -> memoryview | None:
        if span.name is None or span.box is None:
            return None
        for target in by_place.get((section, span.name), []):
            place = _memory_of(target, span.box)
            if place is not None:
                filled.add((id(target), span.box))
                return place
        return None

    hash_file(files, name, writer, take)
    return filled


def _memory_of(target: Target, box: Box) -> memoryview | None:
    """The target's memory for a box of the tensor; None where that is not within it, or not in one stretch."""
    if target.box.overlap(box) != box:
        return None
    run = _only_run(target.box.sizes, box.inside(target.box), layout.ITEM_BYTES[target.entry.dtype])
    return None if run is None else tensors.memory(target.staged)[run[0] : sum(run)]


def _read(files: Files, target: Target, done: set[tuple[int, Box]]) -> None:
    """Fill a target from all pieces that overlap it, but for what is done."""
    for piece in files.pieces(target.section, target.name, target.box):
        part = target.box.overlap(piece.box)
        if part is not None and (id(target), part) not in done:
            where = files.where(piece.file)
            _read_part(files.descriptor(piece.file), piece.stored, part.inside(piece.box), part, target, where)


def _read_part(descriptor: int, stored: Stored, source: Box, part: Box, target: Target, where: str) -> None:
    """Copy a box of a stored tensor into the target; straight into its memory where both are contiguous."""
    item = layout.ITEM_BYTES[stored.dtype]
    from_file, into = _only_run(stored.shape, source, item), _memory_of(target, part)
    if from_file is not None and into is not None:
        disk.read_into(descriptor, into, stored.begin + from_file[0], where)
        return
    _read_by_rows(descriptor, stored, source, tensors.narrow(target.staged, part.inside(target.box)), item, where)


def _only_run(shape: tuple[int, ...], box: Box, item: int) -> tuple[int, int] | None:
    """(offset, length) in bytes of a box that is one stretch of an array; None where it is several."""
    runs = layout.runs(shape, box, item)
    first = next(runs, None)
    return first if next(runs, None) is None else None


def _read_by_rows(descriptor: int, stored: Stored, source: Box, into: torch.Tensor, item: int, where: str) -> None:
    """Read whole rows of dim 0, a bounded number at a time, and take the part that is wanted."""
    row_bytes = max(1, stored.bytes // stored.shape[0])
    at_once = max(1, disk.BLOCK_BYTES // row_bytes)
    inner = Box((0, *source.offsets[1:]), (0, *source.sizes[1:]))
    for row in range(0, source.sizes[0], at_once):
        count = min(at_once, source.sizes[0] - row)
        block = tensors.empty(stored.dtype, (count, *stored.shape[1:]))
        begin = stored.begin + (source.offsets[0] + row) * row_bytes
        disk.read_into(descriptor, tensors.memory(block), begin, where)
        into[row : row + count].copy_(tensors.narrow(block, Box(inner.offsets, (count, *inner.sizes[1:]))))
