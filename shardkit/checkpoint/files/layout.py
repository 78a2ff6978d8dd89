"""Which rank writes which bytes of a checkpoint, and which saved bytes a reader needs: pure functions, without torch.

The index of a checkpoint has the shape, dtype and placement over a mesh of ranks of every tensor. Everything else
follows from these by DTensor's rule (ceil-sized chunks, the last ones smaller or empty), so ranks exchange no plans:

    chunks_of(index, "model", rank)        what a rank writes, in file order
    saved_chunks(name, entry, mesh, box)   the saved pieces that overlap a box, and the ranks that wrote them
    header(...), read_header(...)          the safetensors header of a file
    runs(shape, box, item_bytes)           the byte ranges of a box inside a row-major array

A replicated tensor is written once: a large one is split over the ranks that hold it, a small one is written by one
of them, chosen by a hash of its name. The order of tensors in every file is that of the index: widest dtype first (so
that all data is aligned), then by name.
"""

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Literal

from shardkit.checkpoint.files import disk
from shardkit.dims import part_of_dim
from shardkit.errors import CheckpointCorrupted

Kind = Literal["sharded", "full"]

# The names are those of the safetensors format (https://github.com/huggingface/safetensors#format).
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

# The folder of per-rank tensors; no section has this name.
OWN = "own"
# The file with the state that all ranks share.
COMMON = "state/common.json"
# Replicated tensors below this size are written whole by one rank: splitting them would only create more entries.
SPLIT_BYTES = 1 << 20
# The safetensors reader refuses longer headers.
HEADER_LIMIT_BYTES = 100_000_000


def bytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor of this shape."""
    return prod(shape) * ITEM_BYTES[dtype]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: its offset and size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def overlap(self, other: "Box") -> "Box | None":
        """The intersection of both, None if it is empty."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes)]  # noqa: B905
        sizes = tuple(end - begin for begin, end in zip(begins, ends))  # noqa: B905
        return Box(begins, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: "Box") -> "Box":
        """This box in the coordinates of a box that contains it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets)), self.sizes)  # noqa: B905


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks, in row-major order. `ranks` is None for 0, 1, 2, ..."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()
    _positions: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of a rank, None if it is not in the mesh."""
        if self.ranks is None:
            return unravel(rank, self.shape) if 0 <= rank < self.size else None
        if not self._positions:
            self._positions.update({held: position for position, held in enumerate(self.ranks)})
        position = self._positions.get(rank)
        return None if position is None else unravel(position, self.shape)

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        position = 0
        for size, number in zip(self.shape, coordinate):  # noqa: B905
            position = position * size + number
        return position if self.ranks is None else self.ranks[position]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the index. `placements` has one item for each mesh axis: the sharded dim, or None: replicated."""

    shape: tuple[int, ...]
    dtype: str
    mesh: int
    placements: tuple[int | None, ...]

    @property
    def bytes(self) -> int:
        return bytes_of(self.dtype, self.shape)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold different parts of the tensor."""
        return any(dim is not None for dim in self.placements)

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor that one rank writes."""

    name: str
    dtype: str
    box: Box

    @property
    def bytes(self) -> int:
        return bytes_of(self.dtype, self.box.sizes)


@dataclass
class Index:
    """All tensors of a checkpoint by section and name, in file order; `aliases` are tied names, stored once."""

    kind: Kind
    world_size: int
    meshes: list[Mesh] = field(default_factory=list)
    sections: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)

    def mesh_number(self, mesh: Mesh) -> int:
        """The number of a mesh, which is added if it is new."""
        if mesh not in self.meshes:
            self.meshes.append(mesh)
        return self.meshes.index(mesh)

    def sort(self) -> None:
        """Sort every section into file order."""
        for section, entries in self.sections.items():
            names = sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name))
            self.sections[section] = {name: entries[name] for name in names}


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinate of the position-th cell in row-major order."""
    numbers = []
    for size in reversed(shape):
        position, number = divmod(position, size)
        numbers.append(number)
    return tuple(reversed(numbers))


def local_box(entry: TensorEntry, mesh: Mesh, coordinate: Sequence[int]) -> Box:
    """The part of a tensor that the rank at a coordinate of the mesh holds."""
    offsets, sizes = [0] * len(entry.shape), list(entry.shape)
    for axis, dim in enumerate(entry.placements):
        if dim is not None:
            begin, sizes[dim] = part_of_dim(sizes[dim], mesh.shape[axis], coordinate[axis])
            offsets[dim] += begin
    return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class _Copies:
    """How the ranks with the same replica share the writing: split along `dim`, or, if it is None, all by `owner`."""

    axes: tuple[int, ...]
    count: int
    dim: int | None
    owner: int


def _copies(name: str, entry: TensorEntry, mesh: Mesh) -> _Copies:
    axes = tuple(axis for axis, dim in enumerate(entry.placements) if dim is None)
    count = prod(mesh.shape[axis] for axis in axes)
    sizes = local_box(entry, mesh, (0,) * len(mesh.shape)).sizes
    if count == 1 or bytes_of(entry.dtype, sizes) < SPLIT_BYTES:
        return _Copies(axes, count, None, zlib.crc32(name.encode()) % count)
    dim = 0 if sizes[0] >= count else max(range(len(sizes)), key=sizes.__getitem__)
    return _Copies(axes, count, dim, 0)


def chunk_of(name: str, entry: TensorEntry, mesh: Mesh, rank: int) -> Chunk | None:
    """The piece of a tensor that a rank writes, None if it writes none."""
    coordinate = mesh.coordinate(rank)
    if coordinate is None:
        return None
    box = local_box(entry, mesh, coordinate)
    copies = _copies(name, entry, mesh)
    number = 0
    for axis in copies.axes:
        number = number * mesh.shape[axis] + coordinate[axis]
    if copies.dim is None:
        return Chunk(name, entry.dtype, box) if number == copies.owner and box.count else None
    begin, size = part_of_dim(box.sizes[copies.dim], copies.count, number)
    box = _narrow(box, copies.dim, box.offsets[copies.dim] + begin, size)
    return Chunk(name, entry.dtype, box) if box.count else None


def _narrow(box: Box, dim: int, begin: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = begin, size
    return Box(tuple(offsets), tuple(sizes))


def chunks_of(index: Index, section: str, rank: int) -> list[Chunk]:
    """The chunks of a section that a rank writes, in file order. O(tensors), independent of the world size."""
    chunks = (chunk_of(name, e, index.meshes[e.mesh], rank) for name, e in index.sections[section].items())
    return [chunk for chunk in chunks if chunk is not None]


def saved_chunks(name: str, entry: TensorEntry, mesh: Mesh, box: Box) -> Iterator[tuple[int, Box]]:
    """(rank, box) of every saved piece that overlaps a box of the tensor. O(overlapping pieces)."""
    if not (box.count and prod(entry.shape)):
        return
    copies = _copies(name, entry, mesh)
    levels: list[tuple[int, int, tuple[int, ...]]]
    levels = [(dim, mesh.shape[axis], (axis,)) for axis, dim in enumerate(entry.placements) if dim is not None]
    if copies.dim is not None:
        levels.append((copies.dim, copies.count, copies.axes))
    coordinate = [0] * len(mesh.shape)
    if copies.dim is None:
        _place(coordinate, copies.axes, mesh, copies.owner)
    yield from _descend(levels, mesh, coordinate, entry.whole, box)


def _place(coordinate: list[int], axes: Sequence[int], mesh: Mesh, number: int) -> None:
    for axis, position in zip(axes, unravel(number, [mesh.shape[axis] for axis in axes]), strict=True):
        coordinate[axis] = position


def _descend(
    levels: Sequence[tuple[int, int, tuple[int, ...]]], mesh: Mesh, coordinate: list[int], piece: Box, box: Box
) -> Iterator[tuple[int, Box]]:
    if not levels:
        yield mesh.rank_at(coordinate), piece
        return
    dim, parts, axes = levels[0]
    begin, size = piece.offsets[dim], piece.sizes[dim]
    step = -(-size // parts)
    if not step:
        return
    first = max(0, (box.offsets[dim] - begin) // step)
    last = min(parts - 1, (box.offsets[dim] + box.sizes[dim] - 1 - begin) // step, (size - 1) // step)
    for number in range(first, last + 1):
        _place(coordinate, axes, mesh, number)
        low = number * step
        inner = _narrow(piece, dim, begin + low, min(step, size - low))
        yield from _descend(levels[1:], mesh, coordinate, inner, box)


def runs(shape: Sequence[int], box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of each contiguous range of a box inside a row-major array, in order."""
    if not box.count:
        return
    strides = [prod(shape[dim + 1 :]) * item_bytes for dim in range(len(shape))]
    split = len(shape)  # dims from here on are covered completely, so they are contiguous
    while split and box.sizes[split - 1] == shape[split - 1]:
        split -= 1
    outer = max(split - 1, 0)
    length = prod(box.sizes[outer:]) * item_bytes
    base = sum(offset * stride for offset, stride in zip(box.offsets, strides))  # noqa: B905
    for steps in product(*(range(size) for size in box.sizes[:outer])):
        yield base + sum(step * stride for step, stride in zip(steps, strides)), length  # noqa: B905


def only_run(shape: Sequence[int], box: Box, item_bytes: int) -> tuple[int, int] | None:
    """(offset, length) in bytes of a box that is one contiguous range of the array; None otherwise."""
    found = runs(shape, box, item_bytes)
    first = next(found, None)
    return first if next(found, None) is None else None


def section_name(kind: str, number: int) -> str:
    """model, model_1, ...; optim, optim_1, ..."""
    return kind if number == 0 else f"{kind}_{number}"


def is_model(section: str) -> bool:
    """Whether the section holds a model's tensors."""
    return section.partition("_")[0] == "model"


def file_of(index: Index, section: str, rank: int) -> str:
    """The file, relative to the checkpoint, into which a rank writes its chunks of a section."""
    if index.kind == "full":
        return f"{section}/{section}.safetensors"
    return f"{section}/r{rank:05d}-of-{index.world_size:05d}.safetensors"


def rank_state(rank: int) -> str:
    """The file with the state of one rank."""
    return f"state/rank-{rank:05d}.json"


def own_file(rank: int, world_size: int) -> str:
    """The file, relative to the checkpoint, with the per-rank tensors of a rank."""
    return f"{OWN}/r{rank:05d}-of-{world_size:05d}.safetensors"


def pieces(index: Index, section: str, name: str, box: Box) -> Iterator[tuple[str, Box]]:
    """(file, box) of every stored piece of a tensor that overlaps a box. In a full file a tensor is one piece."""
    entry = index.sections[section][name]
    if index.kind == "full":
        if box.count:
            yield file_of(index, section, 0), entry.whole
        return
    for rank, piece in saved_chunks(name, entry, index.meshes[entry.mesh], box):
        yield file_of(index, section, rank), piece


def header(items: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a safetensors file (length and JSON) with these (name, dtype, shape); data in the same order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in items:
        end = begin + bytes_of(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Stored:
    """The place of one tensor in a safetensors file: `begin` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    bytes: int


def read_header(read: Any, file_bytes: int, where: str) -> dict[str, Stored]:
    """Every tensor of a safetensors file. `read(offset, length)` returns bytes. CheckpointCorrupted if invalid."""
    try:
        (length,) = struct.unpack("<Q", read(0, 8))
        if length > min(HEADER_LIMIT_BYTES, file_bytes - 8):
            raise ValueError(f"a header of {length} bytes in a file of {file_bytes}")
        table = disk.from_json(read(8, length), where)
        table.pop("__metadata__", None)
        found = {name: _stored(value, 8 + length) for name, value in table.items()}
        _check_no_holes(found, 8 + length, file_bytes)
        return found
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError) as error:
        raise CheckpointCorrupted(f"{where}: not a safetensors file ({error}); the file is damaged.") from error


def _stored(value: Mapping[str, Any], data: int) -> Stored:
    begin, end = value["data_offsets"]
    shape, dtype = tuple(value["shape"]), value["dtype"]
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, begin, end)):
        raise ValueError("sizes must be non-negative integers")
    if end - begin != bytes_of(dtype, shape):
        raise ValueError(f"{end - begin} bytes for shape {list(shape)} of {dtype}")
    return Stored(dtype, shape, data + begin, end - begin)


def _check_no_holes(found: Mapping[str, Stored], data: int, file_bytes: int) -> None:
    position = data
    for stored in sorted(found.values(), key=lambda item: (item.begin, item.bytes)):
        if stored.begin != position:
            raise ValueError("its tensors overlap or leave gaps")
        position += stored.bytes
    if position != file_bytes:
        raise ValueError(f"its tensors end at byte {position} of {file_bytes}")
