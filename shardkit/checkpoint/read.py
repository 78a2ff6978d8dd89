"""Loading: any checkpoint on any number of ranks. Everything is read aside and verified before anything is applied.

    open       every rank reads the manifest, and all see the same one
    want       which saved ranges overlap what this rank holds; what does not fit is listed, and nothing is read
    read       this rank's ranges into host memory; each rank hashes its share of the files; all agree
    apply      into the live objects: all of it, or none

A sharded checkpoint and a full one differ in `_pieces` only: a full tensor is one piece in one file.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint import disk, faults, folder, layout, manifest, random_state, tensors
from shardkit.checkpoint.control import Control, LostRank
from shardkit.checkpoint.folder import Skipped
from shardkit.checkpoint.layout import Box, Index, Stored
from shardkit.checkpoint.manifest import Manifest
from shardkit.checkpoint.state import Live, Stateful, Target, apply_objects, apply_tensors, take_back, wanted
from shardkit.checkpoint.verify import Checkpoint, Files, Span, hash_file, open_checkpoint
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


def open_together(path: Path, control: Control) -> Checkpoint:
    """As `open_checkpoint`, on all ranks, which must all see the same one. Collective."""
    found, problem, seen = None, None, None
    try:
        found = open_checkpoint(path) if control.rank == 0 else Checkpoint(path, manifest.read(path))
        seen = manifest.self_digest(path)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    answers = control.gather([problem, seen])
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    if answers[0][0] is not None:
        raise CheckpointError(f"checkpoint: {answers[0][0]}")
    if problems:
        raise CheckpointError(f"checkpoint: {path}: rank 0 sees it, others do not: {'; '.join(problems[:3])}")
    if len({text for _, text in answers}) > 1:
        raise CheckpointError(f"checkpoint: {path}: ranks see different checkpoints; use storage that all ranks share.")
    assert found is not None
    return found


def load(
    live: Live,
    path: Path,
    control: Control,
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
    control: Control,
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
    for step, name in control.share([[found.step, found.path.name] for found in folder.candidates(root)]):
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


def _warn_of(skipped: list[Skipped], checkpoint: Checkpoint, control: Control) -> None:
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
    live: Live, checkpoint: Checkpoint, control: Control, verify: str, strict: bool, data_position: bool
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
    with _Agreement(control, here):
        read_targets(checkpoint, plan.targets.values(), control, verify)
    _apply(live, plan.targets, common, own, control, here)
    _restore_random(checkpoint, common, own, control)
    return Loaded(checkpoint, common, own is not None)


def _apply(
    live: Live,
    targets: dict[tuple[str, str], Target],
    common: dict[str, Any],
    own: dict[str, Any] | None,
    control: Control,
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

    def __init__(self, control: Control, here: str) -> None:
        self.control, self.here = control, here
        self.problems: list[str] = []

    def __enter__(self) -> "_Agreement":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        if error is not None:
            self.problems = [str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"]
        answers = self.control.gather([self.problems, isinstance(error, CheckpointCorrupted)])
        if not any(found for found, _ in answers):
            return
        unique = list(dict.fromkeys(line for found, _ in answers for line in found))
        damaged = any(corrupted for _, corrupted in answers)
        lines = "\n".join(f"  {line}" for line in unique[:8])
        text = f"{self.here}: cannot be loaded; nothing was changed:\n{lines}"
        raise (CheckpointCorrupted if damaged else CheckpointError)(text) from error


def _restore_random(
    checkpoint: Checkpoint, common: dict[str, Any], own: dict[str, Any] | None, control: Control
) -> None:
    """Last of all, so that nothing before it draws from the generators."""
    if own is not None:
        random_state.restore(own["rng"])
        return
    random_state.derive(common["seed"], checkpoint.manifest.step, control.rank)
    if control.rank == 0:
        logger.warning(
            "checkpoint: saved by %d ranks, loading on %d: weights, optimizer and data position are exact; random "
            "generators are seeded anew from (seed, step, rank).",
            checkpoint.manifest.world_size,
            control.world_size,
        )


def verify_together(checkpoint: Checkpoint, control: Control, verify: str = "digest") -> None:
    """Check every byte, each rank its share of the files. Collective; CheckpointCorrupted names what differs."""
    with _Agreement(control, f"checkpoint: {checkpoint.path}"):
        if verify == "digest":
            read_targets(checkpoint, [], control, verify)


def read_targets(checkpoint: Checkpoint, targets: Iterable[Target], control: Control, verify: str) -> None:
    """Fill the targets' host memory, and hash this rank's share of the files on the way. Not collective."""
    faults.reach("verify", control.rank)
    with Files(checkpoint) as files:
        by_place: dict[tuple[str, str], list[Target]] = {}
        for target in targets:
            by_place.setdefault((target.section, target.name), []).append(target)
        done: set[int] = set()
        if verify == "digest":
            for name, writer in _share(checkpoint.manifest, control):
                control.tick()
                done |= _hash(files, name, writer, by_place)
        faults.reach("read", control.rank)
        for group in by_place.values():
            for target in group:
                control.tick()
                if id(target) not in done:
                    _read(files, target)


def _share(record: Manifest, control: Control) -> list[tuple[str, int]]:
    """The (file, writer) pairs that this rank hashes: those of the rank of its own number, which it reads anyway."""
    pairs = [(name, writer) for name, file in record.files.items() for writer in file.digests]
    return sorted((name, writer) for name, writer in pairs if writer % control.world_size == control.rank)


def _hash(files: Files, name: str, writer: int, by_place: dict[tuple[str, str], list[Target]]) -> set[int]:
    """Hash what a rank wrote into a file; pieces that this rank wants whole are read where they are wanted."""
    section, filled = name.split("/")[0], set()

    def take(span: Span) -> memoryview | None:
        target = _wanting(by_place, section, span)
        if target is None:
            return None
        filled.add(id(target))
        return tensors.memory(target.staged)

    hash_file(files, name, writer, take)
    return filled


def _wanting(by_place: dict[tuple[str, str], list[Target]], section: str, span: Span) -> Target | None:
    for target in by_place.get((section, span.name or ""), []):
        if target.box == span.box:
            return target
    return None


def _pieces(index: Index, target: Target) -> Iterator[tuple[str, Box]]:
    """(file, box) of every saved piece that overlaps the target."""
    entry = index.sections[target.section][target.name]
    if index.kind == "full":
        if target.box.count:
            yield layout.file_of(index, target.section, 0), entry.whole
        return
    for rank, box in layout.saved_chunks(target.name, entry, index.meshes[entry.mesh], target.box):
        yield layout.file_of(index, target.section, rank), box


def _read(files: Files, target: Target) -> None:
    """Fill a target from all pieces that overlap it."""
    for name, piece in _pieces(files.checkpoint.index, target):
        part = target.box.overlap(piece)
        if part is None:
            continue
        with files.reading(name) as descriptor:
            stored = files.header(name, descriptor).get(target.name)
            if stored is None or stored.shape != piece.sizes or stored.dtype != target.entry.dtype:
                raise CheckpointCorrupted(
                    f"{files.where(name)}: {target.name} is not as the index says; it is damaged."
                )
            _read_part(descriptor, stored, part.inside(piece), part.inside(target.box), target, files.where(name))


def _read_part(descriptor: int, stored: Stored, source: Box, place: Box, target: Target, where: str) -> None:
    """Copy a box of a stored tensor into a box of the target; straight into its memory where both are contiguous."""
    item = layout.ITEM_BYTES[stored.dtype]
    from_file = _few_runs(stored.shape, source, item)
    into = _few_runs(target.box.sizes, place, item)
    if from_file and into and len(from_file) == len(into) == 1:
        (offset, length), (begin, _) = from_file[0], into[0]
        disk.read_into(descriptor, tensors.memory(target.staged)[begin : begin + length], stored.begin + offset, where)
        return
    _read_by_rows(descriptor, stored, source, tensors.narrow(target.staged, place), item, where)


def _few_runs(shape: tuple[int, ...], box: Box, item: int) -> list[tuple[int, int]] | None:
    runs = layout.runs(shape, box, item)
    first = next(runs, None)
    return None if first is None or next(runs, None) is not None else [first]


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
