"""Writing the bytes of a save: every rank writes and hashes its pieces in one pass, and they are durable before it
reports success."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from shardkit.checkpoint import faults
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, folder, index_json, layout, manifest
from shardkit.checkpoint.files.layout import Chunk, Index
from shardkit.checkpoint.saving import additions, in_store, nan
from shardkit.checkpoint.saving.save_request import PreparedSave
from shardkit.checkpoint.states import tensors
from shardkit.distributed.control import ControlGroup
from shardkit.errors import CheckpointError
from shardkit.storage import upload
from shardkit.storage.url import Place, Url

Result = TypeVar("Result")

# How long a machine may not see a new folder that it has missed before: NFS's cache of folders (nfs(5), acdirmax).
SHARED_STORAGE_WAIT_S = 60.0
# The same of an object in a store, which shows it at once.
SHARED_STORE_WAIT_S = 30.0


def wait_until_seen(temporary: Path) -> None:
    """Wait until this rank sees the folder that rank 0 made. Raises CheckpointError if the storage is not shared."""
    deadline = time.monotonic() + SHARED_STORAGE_WAIT_S
    while True:
        with suppress(OSError):
            if additions.PROBE in os.listdir(temporary):  # a listing, since a look-up can get a stale cached result
                return
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    raise CheckpointError(
        f"{temporary.parent} is not shared by all ranks: rank 0 made a folder that this rank does not see; save to "
        "storage that all machines share, or to an object store"
    )


def write_all(prepared: PreparedSave, control: ControlGroup) -> dict[str, list[Any]]:
    """Write everything of this rank durably. Returns {file: [bytes, digest]}."""
    if prepared.trouble is not None:
        raise prepared.trouble
    temporary, request = prepared.temporary, prepared.request
    if isinstance(request.final, Url):
        in_store.wait_until_marked(request.final, request.save_id, SHARED_STORE_WAIT_S)
        written = put_all(prepared, control, _Store(control.rank))
    else:
        assert isinstance(temporary, Path)
        wait_until_seen(temporary)
        if prepared.pieces[layout.OWN]:
            (temporary / layout.OWN).mkdir(exist_ok=True)
        written = put_all(prepared, control, _Disk(control.rank))
        if control.rank == 0 and request.staging is not None:
            prepared.added = additions.take(request.staging, temporary, request.digest)
    faults.reach("agree-1", control.rank)
    return written


def is_written(prepared: PreparedSave, control: ControlGroup) -> bool:
    """Whether the existing checkpoint with this name contains exactly what this rank would write."""
    request = prepared.request
    try:
        found = folder.inspect(request.final) if control.rank == 0 else manifest.read(request.final)
    except (CheckpointError, OSError):
        return False
    if (found.world_size, found.digest) != (control.world_size, request.digest):
        return False
    there = {
        name: [file.bytes, file.digests[control.rank]]
        for name, file in found.files.items()
        if control.rank in file.digests
    }
    return there == put_all(prepared, control, Nowhere())


def full_header(index: Index, section: str) -> bytes:
    """The header of the file into which all ranks write a section."""
    return layout.header(((name, e.dtype, e.shape) for name, e in index.sections[section].items()), {"format": "pt"})


def begin_full_file(index: Index, temporary: Path, section: str) -> None:
    if not index.sections[section]:
        return
    head = full_header(index, section)
    size = len(head) + sum(entry.bytes for entry in index.sections[section].values())
    disk.write_new(temporary / layout.file_of(index, section, 0), head, size)


class File(Protocol):
    """A file that is written at offsets."""

    def put(self, data: memoryview, offset: int) -> None: ...


class Sink(Protocol):
    """The target of a save."""

    def write(self, path: Place, size: int, action: Callable[[File], Result], flags: int = disk.NEW) -> Result:
        """Open a file, let the action write it, and return the action's result. With `flags` 0 the file exists already,
        and the action writes a part of it."""

    def reach(self, point: str) -> None: ...


class _Disk:
    """A folder on a disk."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(self, path: Place, size: int, action: Callable[[File], Result], flags: int = disk.NEW) -> Result:
        assert isinstance(path, Path)
        with disk.Durable(path, flags, self.reach) as file:
            return action(file)

    def reach(self, point: str) -> None:
        faults.reach(point, self.rank)


class _Store(_Disk):
    """An object store. A failed upload is repeated."""

    def write(self, path: Place, size: int, action: Callable[[File], Result], flags: int = disk.NEW) -> Result:
        assert isinstance(path, Url) and flags == disk.NEW

        def once() -> Result:
            with upload.Upload(path, size, self.reach) as file:
                return action(file)

        return upload.again(once)


class Nowhere:
    """Writes nothing; used to compute the digests of what would be written."""

    def write(self, path: Place, size: int, action: Callable[[File], Result], flags: int = disk.NEW) -> Result:
        return action(self)

    def reach(self, point: str) -> None: ...

    def put(self, data: memoryview, offset: int) -> None: ...


def put_all(prepared: PreparedSave, control: ControlGroup, sink: Sink) -> dict[str, list[Any]]:
    """Write everything of this rank to the sink. Returns {file: [bytes, digest]}."""
    written: dict[str, list[Any]] = {}
    control.work.expect(tensors.bytes_to_write(prepared.pieces))
    with _Hasher(prepared.request.digest) as hasher:
        writer = _Writer(prepared, control, sink, hasher)
        for section, pieces in prepared.pieces.items():
            if prepared.index.kind == "full" and section != layout.OWN:
                written |= writer.put_into_full(section, pieces)
            elif pieces:
                written |= writer.put_own_file(section, pieces)
    for name, data in _json_files(prepared, control.rank).items():
        sink.write(prepared.temporary / name, len(data), partial(_put_whole, data))
        written[name] = [len(data), digests.of_bytes(prepared.request.digest, data)]
    return written


def _put_whole(data: bytes, file: File) -> None:
    file.put(memoryview(data), 0)


def _json_files(prepared: PreparedSave, rank: int) -> dict[str, bytes]:
    to_json = disk.to_json_in_order if _has_dicts_of_script(prepared.own) else disk.to_json
    files = {layout.rank_state(rank): to_json(prepared.own)}
    if rank == 0:
        files["index.json"] = disk.to_json_in_order(index_json.to_json(prepared.index))
        files[layout.COMMON] = disk.to_json_in_order(prepared.common)
        if prepared.request.config_text is not None:
            files["config.yaml"] = prepared.request.config_text.encode()
    return files


def _has_dicts_of_script(own: dict[str, Any]) -> bool:
    """Whether a rank's state has dicts whose order may matter to the script: in per-rank state, or in the own state of
    a dataset, which may read its sources in the order of such a dict."""
    return "apart" in own or any(isinstance(one.get("dataset"), (dict, list)) for one in own["loaders"].values())


class _Hasher:
    """Computes digests of what is written; sha256, which is slow, in a thread (hashlib releases the GIL)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = ThreadPoolExecutor(1, "shardkit-digest") if name == "sha256" else None

    def __enter__(self) -> "_Hasher":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def write(self, digest: digests.Digest, data: memoryview, file: File, offset: int) -> None:
        """Hash and write the same bytes, block by block."""
        for begin in range(0, len(data), disk.BLOCK_BYTES):
            block = data[begin : begin + disk.BLOCK_BYTES]
            hashed = self._begin(digest, block)
            try:
                file.put(block, offset + begin)
            finally:
                if hashed is not None:
                    hashed.result()
                else:
                    digest.update(block)

    def _begin(self, digest: digests.Digest, block: memoryview) -> Future[None] | None:
        """The thread's work on a block; None where there is no thread: a save in the background may outlast the script,
        and Python starts no threads while it ends."""
        with suppress(RuntimeError):
            return self._thread.submit(digest.update, block) if self._thread else None
        return None


@dataclass(frozen=True)
class _Writer:
    """Writes and hashes this rank's pieces of a section. The methods return {file: [bytes, digest]}."""

    prepared: PreparedSave
    control: ControlGroup
    sink: Sink
    hasher: _Hasher

    def put_own_file(self, section: str, pieces: list[tuple[Chunk, torch.Tensor]]) -> dict[str, list[Any]]:
        """A file of this rank alone."""
        rank, index = self.control.rank, self.prepared.index
        is_own = section == layout.OWN
        name = layout.own_file(rank, self.control.world_size) if is_own else layout.file_of(index, section, rank)
        head = layout.header(((chunk.name, chunk.dtype, chunk.box.sizes) for chunk, _ in pieces), {"format": "pt"})
        size = len(head) + sum(chunk.bytes for chunk, _ in pieces)

        def write(file: File) -> str:
            digest, done = digests.new(self.hasher.name), len(head)
            self.hasher.write(digest, memoryview(head), file, 0)
            for chunk, data in self._in_host_memory(section, pieces):
                self.hasher.write(digest, tensors.memory(data), file, done)
                done += chunk.bytes
            return digest.hexdigest()

        return {name: [size, self.sink.write(self.prepared.temporary / name, size, write)]}

    def put_into_full(self, section: str, pieces: list[tuple[Chunk, torch.Tensor]]) -> dict[str, list[Any]]:
        """The file of all ranks, in which each box has its place in its whole tensor: one byte range if it is sharded
        on dim 0, else one per row."""
        rank, index = self.control.rank, self.prepared.index
        entries = index.sections[section]
        if not entries or not (pieces or rank == 0):
            return {}
        name, head = layout.file_of(index, section, rank), full_header(index, section)
        begins, size = _begins(index, section, len(head))

        def write(file: File) -> str:
            digest = digests.new(self.hasher.name)
            if rank == 0:  # rank 0 wrote the header
                digest.update(memoryview(head))
            for chunk, data in self._in_host_memory(section, pieces):
                memory, done = tensors.memory(data), 0
                itemsize = layout.ITEM_BYTES[chunk.dtype]
                for offset, length in layout.runs(entries[chunk.name].shape, chunk.box, itemsize):
                    self.hasher.write(digest, memory[done : done + length], file, begins[chunk.name] + offset)
                    done += length
            return digest.hexdigest()

        return {name: [size, self.sink.write(self.prepared.temporary / name, size, write, flags=0)]}

    def _in_host_memory(
        self, section: str, pieces: list[tuple[Chunk, torch.Tensor]]
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """The pieces one by one, each copied to the CPU when it is yielded, and gone with the next."""
        memory = tensors.HostMemory()
        for number, (chunk, tensor) in enumerate(pieces):
            if number == len(pieces) // 2:
                self.sink.reach("write")
            self.control.work()
            data = memory.of(tensor)
            nan.note(self.prepared, section, chunk.name, data)
            yield chunk, data
            self.control.work(chunk.bytes)


def _begins(index: Index, section: str, data: int) -> tuple[dict[str, int], int]:
    """Where each tensor of a section begins in its file, whose data begin at `data`; and the file's size."""
    begins = {}
    for name, entry in index.sections[section].items():
        begins[name] = data
        data += entry.bytes
    return begins, data
