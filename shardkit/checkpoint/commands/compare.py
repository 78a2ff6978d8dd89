"""Byte-by-byte comparison of two checkpoints, saved on any number of ranks. Torch is imported only if values differ, to
compute how far they are apart."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from shardkit import values
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, index_json, layout, paths
from shardkit.checkpoint.files.layout import ITEM_BYTES, Box, TensorEntry
from shardkit.checkpoint.files.state_json import section_of
from shardkit.checkpoint.files.verify import Checkpoint, Files, damages
from shardkit.errors import CheckpointCorrupted

if TYPE_CHECKING:
    import torch

FACTS = ("kind", "step", "epoch", "samples_seen", "world_size", "mesh", "config_sha256", "model_fingerprint", "run_id")


@dataclass(frozen=True)
class Magnitude:
    """How much one tensor differs: in `count` of its `of` values, with the largest absolute difference and the largest
    one relative to the larger of the two values. None if no difference is finite."""

    count: int
    of: int
    max_abs: float | None
    max_rel: float | None


@dataclass
class CheckpointDifference:
    """The differences. Tensors are named `section: name`; `equal` counts those with identical bytes."""

    facts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    other_shape: dict[str, tuple[str, str]] = field(default_factory=dict)
    other_values: list[str] = field(default_factory=list)
    other_state: list[str] = field(default_factory=list)
    state_values: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    """For states in `other_state` the values that differ, by their place: {"groups.0.settings.lr": (0.1, 0.05)}."""
    magnitudes: dict[str, Magnitude] = field(default_factory=dict)
    equal: int = 0

    @property
    def same_state(self) -> bool:
        """Whether a run resumes identically from both. The `facts` about the save itself may differ."""
        return not (self.only_first or self.only_second or self.other_shape or self.other_values or self.other_state)

    def to_json(self) -> dict[str, Any]:
        return {"same_state": self.same_state, **asdict(self)}


def compare(
    first: Checkpoint, second: Checkpoint, on_bytes: Callable[[int], None] = lambda n: None
) -> CheckpointDifference:
    """The differences in tensors, in the states of schedulers, loaders and registered objects, in the files of save
    hooks, and in the manifests.

    Raises CheckpointCorrupted if one of the two is damaged.
    """
    _refuse_damaged(first, second, on_bytes)
    found = CheckpointDifference()
    for name in FACTS:
        pair = getattr(first.manifest, name), getattr(second.manifest, name)
        if pair[0] != pair[1]:
            found.facts[name] = pair
    found.state_values = _other_state(first, second)
    found.other_state = [*found.state_values]
    with Files(first) as a, Files(second) as b:
        found.other_state += _other_per_rank_state(a, b) + _other_files(a, b)
        _compare_tensors(a, b, found, on_bytes)
    return found


def _refuse_damaged(first: Checkpoint, second: Checkpoint, on_bytes: Callable[[int], None]) -> None:
    different = {paths.real(item.path): item for item in (first, second)}.values()
    problems = [line for item in different for line in damages(item, on_bytes)]
    if problems:
        raise CheckpointCorrupted("\n".join([*problems, "checkpoint: damaged checkpoints are not compared."]))


def _other_state(first: Checkpoint, second: Checkpoint) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Non-tensor state that differs: objects by name, positions of loaders, settings of each optimizer."""
    one, two = (_flat_state(item.common()) for item in (first, second))
    names = [name for name in dict.fromkeys([*one, *two]) if one.get(name) != two.get(name)]
    return {name: dict(_unequal(one.get(name), two.get(name))) for name in names}


def _unequal(one: Any, two: Any, place: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The innermost values that differ in two JSON values; None for what one of them lacks."""
    if isinstance(one, list) and isinstance(two, list):
        one, two = (dict(enumerate(given)) for given in (one, two))
    if not (isinstance(one, dict) and isinstance(two, dict)):
        if one != two:
            yield place, (one, two)
        return
    for key in dict.fromkeys([*one, *two]):
        is_encoding = str(key).startswith("$")  # such as {"$tuple": [...]}
        inside = place if is_encoding else f"{place}.{key}".lstrip(".")
        yield from _unequal(one.get(key), two.get(key), inside)


def _other_per_rank_state(a: Files, b: Files) -> list[str]:
    """Per-rank state that differs. If the two were saved on different numbers of ranks, all of it."""
    one, two = a.checkpoint, b.checkpoint
    if not (one.apart or two.apart):
        return []
    if one.manifest.world_size != two.manifest.world_size:
        return list(dict.fromkeys([*one.apart, *two.apart]))
    different = []
    for rank in range(one.manifest.world_size):
        mine, theirs = _per_rank_state(a, rank), _per_rank_state(b, rank)
        labels = [label for label in dict.fromkeys([*mine, *theirs]) if mine.get(label) != theirs.get(label)]
        different += [f"rank {rank}: {label}" for label in labels]
    return different


def _per_rank_state(files: Files, rank: int) -> dict[str, Any]:
    """{label: (value, digests of the tensors in it)} of one rank's state."""
    found, name = {}, layout.own_file(rank, files.checkpoint.manifest.world_size)
    for item in files.checkpoint.of_rank(rank).get("apart", []):
        data = {}
        for tensor in values.tensors_in(item["value"]):
            stored = files.header(name).get(f"{section_of(item['at'])}:{tensor}") if files.has(name) else None
            if stored is not None:
                where, source = files.where(name), files.source(name)
                digest = digests.of_range(source, stored.begin, stored.bytes, where)
                data[tensor] = (stored.dtype, stored.shape, digest)
        found[item["label"]] = (item["value"], data)
    return found


def _other_files(a: Files, b: Files) -> list[str]:
    """Files of save hooks that differ, or that only one has: load hooks may load a model from them."""
    one, two = _digests_of_additions(a), _digests_of_additions(b)
    return [f"file {name}" for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]


def _digests_of_additions(files: Files) -> dict[str, str]:
    """Of the files themselves, since the digests in two manifests may be of two kinds."""
    return {
        name: digests.of_range(files.source(name), 0, file.bytes, files.where(name))
        for name, file in files.checkpoint.manifest.additions.items()
    }


def _flat_state(common: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(common["objects"]) | dict(common["loaders"])
    return found | {f"optim {number} settings": value for number, value in enumerate(common["optimizers"])}


def _compare_tensors(a: Files, b: Files, found: CheckpointDifference, on_bytes: Callable[[int], None]) -> None:
    one, two = _entries(a), _entries(b)
    found.only_first = [_label(key) for key in one if key not in two]
    found.only_second = [_label(key) for key in two if key not in one]
    untouched = _sections_with_equal_digests(a, b)
    for key in (key for key in one if key in two):
        kinds = [f"{entries[key].dtype} {list(entries[key].shape)}" for entries in (one, two)]
        if kinds[0] != kinds[1]:
            found.other_shape[_label(key)] = (kinds[0], kinds[1])
        elif key[0] in untouched or _same_bytes(a, b, key, on_bytes):
            found.equal += 1
        else:
            found.other_values.append(_label(key))
            found.magnitudes[_label(key)] = _magnitude(a, b, key)


def _entries(files: Files) -> dict[tuple[str, str], TensorEntry]:
    sections = files.checkpoint.index.sections
    return {(section, name): entry for section, entries in sections.items() for name, entry in entries.items()}


def _label(key: tuple[str, str]) -> str:
    return f"{key[0]}: {key[1]}"


def _sections_with_equal_digests(a: Files, b: Files) -> set[str]:
    """Sections whose index and digests are equal in both, so that no tensor of them has to be read."""
    one, two = a.checkpoint, b.checkpoint
    if index_json.to_json(one.index) != index_json.to_json(two.index) or one.manifest.digest != two.manifest.digest:
        return set()
    equal = set()
    for section in one.index.sections:
        parts = [
            {name: file for name, file in item.manifest.files.items() if name.startswith(f"{section}/")}
            for item in (one, two)
        ]
        if parts[0] == parts[1]:
            equal.add(section)
    return equal


def _same_bytes(a: Files, b: Files, key: tuple[str, str], on_bytes: Callable[[int], None]) -> bool:
    entry = a.checkpoint.index.sections[key[0]][key[1]]
    for box in _blocks(entry):
        on_bytes(2 * box.count * ITEM_BYTES[entry.dtype])
        if read_box(a, *key, box) != read_box(b, *key, box):
            return False
    return True


def _magnitude(a: Files, b: Files, key: tuple[str, str]) -> Magnitude:
    """How much the values differ, computed block by block. Only this and `_in_halves` need torch."""
    import torch

    from shardkit.checkpoint.states.tensors import TORCH_DTYPES

    entry = a.checkpoint.index.sections[key[0]][key[1]]
    wide = torch.complex128 if entry.dtype == "C64" else torch.float64
    count, largest, relative = 0, None, None
    for box in _blocks(entry):
        given = [torch.frombuffer(read_box(f, *key, box), dtype=TORCH_DTYPES[entry.dtype]) for f in (a, b)]
        one, two = (tensor.to(wide) for tensor in given)
        # Doubles hold integers up to 2^53, so those of 64 bits are subtracted in halves.
        apart = (_in_halves(*given) if entry.dtype in ("I64", "U64") else one - two).abs()
        alike = (apart == 0) | (one.isinf() & (one == two)) | (one.isnan() & two.isnan())
        count += int((~alike).sum())
        finite = apart.isfinite() & (apart > 0)
        if finite.any():
            share = apart[finite] / torch.maximum(one.abs(), two.abs())[finite]
            largest = max(largest or 0.0, float(apart[finite].max()))
            relative = max(relative or 0.0, float(share.max()))
    return Magnitude(count, entry.whole.count, largest, relative)


def _in_halves(one: "torch.Tensor", two: "torch.Tensor") -> "torch.Tensor":
    """The difference of two tensors of 64-bit integers, as doubles; exact if it is below 2^53."""
    import torch

    def halves(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        signed, low = given.view(torch.int64), 0xFFFFFFFF
        return (signed >> 32) & (low if given.dtype is torch.uint64 else -1), signed & low

    (high, low), (other_high, other_low) = halves(one), halves(two)
    return (high - other_high).double() * 2.0**32 + (low - other_low).double()


def _blocks(entry: TensorEntry) -> Iterator[Box]:
    """Rows of dim 0 of a tensor, a bounded number of bytes at a time (at least one row)."""
    if not entry.shape:
        yield entry.whole
        return
    rest = entry.shape[1:]
    at_once = max(1, disk.BLOCK_BYTES // max(1, prod(rest) * ITEM_BYTES[entry.dtype]))
    for row in range(0, entry.shape[0], at_once):
        yield Box((row, *(0 for _ in rest)), (min(at_once, entry.shape[0] - row), *rest))


def read_box(files: Files, section: str, name: str, box: Box) -> bytearray:
    """The bytes of a box of a saved tensor, in row-major order, assembled from the pieces that overlap it."""
    item = ITEM_BYTES[files.checkpoint.index.sections[section][name].dtype]
    data = bytearray(box.count * item)
    for piece in files.pieces(section, name, box):
        part = box.overlap(piece.box)
        if part is None:
            continue
        inside, outside = part.inside(piece.box), part.inside(box)
        for source, target, length in _common_runs(piece.stored.shape, inside, box.sizes, outside, item):
            view = memoryview(data)[target : target + length]
            disk.read_into(files.source(piece.file), view, piece.stored.begin + source, files.where(piece.file))
    return data


def _common_runs(
    source_shape: Sequence[int], source: Box, target_shape: Sequence[int], target: Box, item: int
) -> Iterator[tuple[int, int, int]]:
    """(offset in the source, offset in the target, length) of byte ranges that are contiguous in both."""
    left, right = layout.runs(source_shape, source, item), layout.runs(target_shape, target, item)
    (a, more_a), (b, more_b) = next(left, (0, 0)), next(right, (0, 0))
    while more_a and more_b:
        length = min(more_a, more_b)
        yield a, b, length
        a, b, more_a, more_b = a + length, b + length, more_a - length, more_b - length
        if not more_a:
            a, more_a = next(left, (0, 0))
        if not more_b:
            b, more_b = next(right, (0, 0))
