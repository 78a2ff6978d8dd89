"""Opening a checkpoint and verifying its digests, without torch.

open_checkpoint(path)          checks the manifest, and that all files exist with their sizes
damages(checkpoint)            checks all digests; a line for each damaged file
hash_file(files, name, ...)    checks the part of one file that one rank wrote; can copy the bytes in the same pass
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardkit.checkpoint.files import access, disk, folder, index_json, layout, manifest, state_json
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files.layout import Box, Index, Stored
from shardkit.checkpoint.files.manifest import Manifest
from shardkit.errors import CheckpointCorrupted
from shardkit.storage.url import Place

# Files that stay open: opening a file for each tensor takes longer than reading small ones. The limit of open files is
# 256 (macOS) or more.
FILES_OPEN = 64


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with its manifest. Its small files are verified when they are read."""

    path: Place
    manifest: Manifest

    def where(self, name: str) -> str:
        """The path of a file, for messages."""
        return str(self.path / self.manifest.stored(name))

    def text(self, name: str) -> bytes:
        """The contents of a small file. Raises CheckpointCorrupted if its digest differs."""
        if name not in self.manifest.files:
            raise CheckpointCorrupted(f"{self.where(name)}: not in the manifest; the checkpoint is incomplete.")
        file = self.manifest.files[name]
        with self.or_replaced():
            data = disk.read_small(self.path, self.manifest.stored(name), stated_bytes=file.bytes)
            found = digests.of_bytes(self.manifest.digest, data)
            if found not in file.digests.values():
                raise CheckpointCorrupted(differs(self.where(name), self.manifest))
        return data

    @contextmanager
    def or_replaced(self) -> Iterator[None]:
        """Where something in the block looks damaged, and another checkpoint has the name by now, an error that says
        so."""
        try:
            yield
        except CheckpointCorrupted:
            if manifest.is_replaced(self.path, self.manifest):
                raise self.replaced() from None
            raise

    def replaced(self) -> CheckpointCorrupted:
        return CheckpointCorrupted(f"{self.path}: was replaced by another checkpoint while it was read; load again.")

    def json(self, name: str) -> Any:
        """The value of a small JSON file."""
        return disk.from_json(self.text(name), self.where(name))

    def common(self) -> dict[str, Any]:
        """The state that all ranks share."""
        return state_json.common(self.json(layout.COMMON), self.where(layout.COMMON))

    def of_rank(self, rank: int) -> dict[str, Any]:
        """The state of one rank."""
        name = layout.rank_state(rank)
        return state_json.of_rank(self.json(name), self.where(name))

    @cached_property
    def apart(self) -> list[str]:
        """Labels of the per-rank state: names of objects, and `optim: */key` for optimizer state of parameters."""
        return [state_json.label_of(place) for place in self.common().get("apart", [])]

    @cached_property
    def index(self) -> Index:
        """The index of all tensors."""
        return index_json.from_json(self.json("index.json"), self.where("index.json"))


def differs(where: str, record: Manifest) -> str:
    """The message for a file with a wrong digest."""
    return f"{where}: its {record.digest} digest differs from the manifest (corrupted)"


def open_checkpoint(path: Place) -> Checkpoint:
    """A checkpoint, after a check that all files exist with the right sizes. Raises CheckpointError with the reason."""
    return Checkpoint(path, folder.inspect(path))


def damages(checkpoint: Checkpoint, on_bytes: Callable[[int], None] = lambda size: None) -> list[str]:
    """A line for each damaged file of a checkpoint. Reads everything once.

    `on_bytes` is called with the size of each part that is read, for a progress bar.
    """
    problems: list[str] = []

    def count(span: Span) -> None:
        on_bytes(span.bytes)

    with Files(checkpoint) as files:
        for name, file in checkpoint.manifest.every_file.items():
            try:
                for writer in file.digests:
                    hash_file(files, name, writer, count)
            except CheckpointCorrupted as error:
                problems.append(str(error))
    return list(dict.fromkeys(problems))


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in one file: its box in the tensor, and its place in the file."""

    file: str
    box: Box
    stored: Stored


class Files:
    """The tensor files of a checkpoint. They are opened at first use; the last FILES_OPEN used stay open.

    All are in the folder that had the checkpoint's name when the `with` block began. Raises CheckpointCorrupted if that
    folder already contains another checkpoint, or if a file changes after it was first opened.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._folder: access.Folder
        self._opened: OrderedDict[str, tuple[disk.Source, ExitStack]] = OrderedDict()
        self._headers: dict[str, dict[str, Stored]] = {}
        self._seen: dict[str, Any] = {}

    def __enter__(self) -> "Files":
        try:
            self._folder = access.folder(self.checkpoint.path)
        except FileNotFoundError:
            raise CheckpointCorrupted(f"{self.checkpoint.path}: was deleted; use another checkpoint.") from None
        try:
            self._refuse_another()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        while self._opened:
            self._close_oldest()
        self._folder.close()

    def _refuse_another(self) -> None:
        text = self._folder.small(manifest.NAME)
        if manifest.from_bytes(text, self.where(manifest.NAME)).save_id != self.checkpoint.manifest.save_id:
            raise self.checkpoint.replaced()

    def _close_oldest(self) -> None:
        _, (_, stack) = self._opened.popitem(last=False)
        stack.close()

    def refuse_changed(self) -> None:
        """Raises CheckpointCorrupted if an open file was rewritten since it was first opened."""
        for name, (source, _) in self._opened.items():
            self._refuse_changed(name, source)

    def _refuse_changed(self, name: str, source: disk.Source) -> None:
        seen = self._folder.state(self._stored(name), source)
        if self._seen.setdefault(name, seen) != seen:
            raise CheckpointCorrupted(f"{self.where(name)}: was changed while it was read; load again.")

    def where(self, name: str) -> str:
        return self.checkpoint.where(name)

    def _stored(self, name: str) -> str:
        return self.checkpoint.manifest.stored(name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a file with this name."""
        return name in self.checkpoint.manifest.files

    def source(self, name: str) -> disk.Source:
        """The source to read a file from. Valid only until the next call, which may close it."""
        if name not in self._opened:
            if name not in self.checkpoint.manifest.every_file:
                raise CheckpointCorrupted(f"{self.where(name)}: not in the manifest; the checkpoint is incomplete.")
            if len(self._opened) == FILES_OPEN:
                oldest = next(iter(self._opened))
                self._refuse_changed(oldest, self._opened[oldest][0])
                self._close_oldest()
            with self.checkpoint.or_replaced(), ExitStack() as stack:
                opened = stack.enter_context(self._folder.opened(self._stored(name)))
                self._refuse_changed(name, opened)
                self._opened[name] = (opened, stack.pop_all())
        self._opened.move_to_end(name)
        return self._opened[name][0]

    def header(self, name: str) -> dict[str, Stored]:
        """The tensors of a file, with their places."""
        if name not in self._headers:
            size, where, source = self.checkpoint.manifest.files[name].bytes, self.where(name), self.source(name)
            found = layout.read_header(lambda at, length: disk.read_at(source, at, length, where), size, where)
            self._headers[name] = found
        return self._headers[name]

    def pieces(self, section: str, name: str, box: Box) -> Iterator[Piece]:
        """All pieces that overlap a box of a tensor. Raises CheckpointCorrupted if a file does not match the index."""
        entry = self.checkpoint.index.sections[section][name]
        for file, held in layout.pieces(self.checkpoint.index, section, name, box):
            stored = self.header(file).get(name)
            if stored is None or stored.shape != held.sizes or stored.dtype != entry.dtype:
                raise CheckpointCorrupted(f"{self.where(file)}: {name} does not match the index; it is damaged.")
            yield Piece(file, held, stored)


@dataclass(frozen=True)
class Span:
    """A part of what one rank wrote into a file: a piece of a tensor, or (name None) a header or a whole small
    file."""

    name: str | None
    box: Box | None
    ranges: list[tuple[int, int]]

    @property
    def bytes(self) -> int:
        return sum(length for _, length in self.ranges)


def spans(files: Files, name: str, writer: int) -> Iterator[Span]:
    """The parts that a rank wrote into a file, in the order in which they were hashed."""
    record = files.checkpoint.manifest
    size = record.every_file[name].bytes
    if name in record.additions or not name.endswith(".safetensors") or name.startswith(f"{layout.OWN}/"):
        yield Span(None, None, [(0, size)])
        return
    index, section = files.checkpoint.index, name.split("/")[0]
    if section not in index.sections:
        raise CheckpointCorrupted(f"{files.where(name)}: not in the index; the checkpoint is damaged.")
    stored = files.header(name)
    data = min((item.begin for item in stored.values()), default=size)
    if index.kind == "sharded" or writer == 0:
        yield Span(None, None, [(0, data)])
    for chunk in layout.chunks_of(index, section, writer):
        place = stored.get(chunk.name)
        shape = chunk.box.sizes if index.kind == "sharded" else index.sections[section][chunk.name].shape
        if place is None or (place.dtype, place.shape) != (chunk.dtype, shape):
            raise CheckpointCorrupted(f"{files.where(name)}: {chunk.name} does not match the index; it is damaged.")
        if index.kind == "sharded":
            yield Span(chunk.name, chunk.box, [(place.begin, place.bytes)])
        else:
            item = layout.ITEM_BYTES[chunk.dtype]
            runs = layout.runs(place.shape, chunk.box, item)
            yield Span(chunk.name, chunk.box, [(place.begin + offset, length) for offset, length in runs])


def check_headers(files: Files, name: str, writer: int) -> None:
    """Raises CheckpointCorrupted if a file does not match the index. Reads only its header."""
    for _ in spans(files, name, writer):
        pass


def hash_file(
    files: Files, name: str, writer: int, take: Callable[[Span], memoryview | None] = lambda span: None
) -> None:
    """Hash the bytes that a rank wrote into a file. Raises CheckpointCorrupted if the digest differs.

    `take(span)` may return memory of the span's size; the bytes are then copied into it.
    """
    record = files.checkpoint.manifest
    digest = digests.new(record.digest)
    where, source = files.where(name), files.source(name)
    scratch = digests.scratch(source)
    for span in spans(files, name, writer):
        target = take(span)
        if target is not None:
            _read_and_hash(source, target, span.ranges, digest, where)
        else:
            digests.feed(digest, source, span.ranges, where, scratch)
    if digest.hexdigest() != record.every_file[name].digests[writer]:
        raise CheckpointCorrupted(differs(where, record))


def _read_and_hash(
    source: disk.Source, data: memoryview, ranges: list[tuple[int, int]], digest: digests.Digest, where: str
) -> None:
    for offset, length in ranges:
        for low in range(0, length, disk.BLOCK_BYTES):
            block = data[low : min(low + disk.BLOCK_BYTES, length)]
            disk.read_into(source, block, offset + low, where)
            digest.update(block)
        data = data[length:]
