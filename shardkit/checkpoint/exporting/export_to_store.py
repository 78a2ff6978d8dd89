"""save_model into an object store, where two ranks cannot write to one file.

    put_pieces     every rank uploads its pieces, cast to the target dtype, as one object with a temporary name
    assemble       every rank builds some of the files: it reads the pieces of all ranks and uploads them in file order
    publish        rank 0: if there are several files, uploads their index; then deletes files of an earlier export

A single file is replaced atomically by its upload. Several files get unused names, so that an earlier export stays
complete until the index is written. The extra memory is one part of an upload, and one tensor if it is sharded on
another dim than the first.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardkit.checkpoint.exporting import export
from shardkit.checkpoint.exporting.export import ExportFile
from shardkit.checkpoint.files import disk, layout, manifest
from shardkit.checkpoint.files.layout import Box, Chunk, Index, Stored
from shardkit.checkpoint.states import tensors
from shardkit.errors import CheckpointSaveError
from shardkit.storage import objects, upload
from shardkit.storage.url import Url

OnBytes = Callable[[int], None]


def begin(url: Url, files: Sequence[ExportFile]) -> str:
    """On rank 0: the suffix for the names of several files. CheckpointSaveError if the URL is in a checkpoint."""
    for length in range(2, len(url.parts) + 1):
        place = Url(url.scheme, url.parts[:length])
        if manifest.is_checkpoint(place):
            raise CheckpointSaveError(
                f"{url}: is inside the checkpoint {place}, and an export would damage it; give another URL."
            )
    return export.free_tag(files, objects.names(url))


def pieces_of(url: Url, export_id: str, rank: int) -> Url:
    """The temporary object with the pieces of a rank."""
    return url / f"{export.TEMPORARY}{export_id}" / f"r{rank:05d}"


def put_pieces(
    url: Url, pieces: Sequence[tuple[Chunk, torch.Tensor]], places: Mapping[str, Stored], on_bytes: OnBytes
) -> None:
    """Upload all pieces of this rank as one object, each cast to the dtype of its file."""
    size = sum(_bytes_of(chunk, places) for chunk, _ in pieces)
    if not size:
        return

    def write() -> None:
        done = 0
        with upload.Upload(url, size) as file:
            for chunk, piece in pieces:
                for block in _cast(piece, tensors.TORCH_DTYPES[places[chunk.name].dtype]):
                    file.put(block, done)
                    done += len(block)
                on_bytes(chunk.bytes)

    upload.again(write)


def _bytes_of(chunk: Chunk, places: Mapping[str, Stored]) -> int:
    return chunk.box.count * layout.ITEM_BYTES[places[chunk.name].dtype]


def _cast(piece: torch.Tensor, target: torch.dtype) -> Iterator[memoryview]:
    flat = piece.detach().contiguous().view(-1)
    at_once = disk.BLOCK_BYTES // max(flat.element_size(), target.itemsize)
    for low in range(0, flat.numel(), at_once):
        yield tensors.memory(flat[low : low + at_once].to("cpu", target))


class _Piece(NamedTuple):
    """A box of a tensor, stored in the object of `rank` from byte `begin` on."""

    rank: int
    begin: int
    box: Box


def _where(index: Index, world_size: int, places: Mapping[str, Stored]) -> dict[str, list[_Piece]]:
    """All pieces of every tensor, computed from the index alone, by the rule that ranks follow when they write."""
    found: dict[str, list[_Piece]] = {name: [] for name in places}
    for rank in range(world_size):
        done = 0
        for chunk in layout.chunks_of(index, "model", rank):
            found[chunk.name].append(_Piece(rank, done, chunk.box))
            done += _bytes_of(chunk, places)
    return found


def assemble(
    url: Url, export_id: str, index: Index, world_size: int, files: Sequence[ExportFile], mine: Sequence[ExportFile]
) -> None:
    """Upload the files in `mine`, built from the pieces of all ranks."""
    where = _where(index, world_size, {name: place for file in files for name, place in file.places.items()})
    for file in mine:
        upload.again(partial(_assemble, url, export_id, file, where))


def _assemble(url: Url, export_id: str, file: ExportFile, where: Mapping[str, list[_Piece]]) -> None:
    readers: dict[int, objects.Reader] = {}

    def read(piece: _Piece, offset: int, target: memoryview) -> None:
        if piece.rank not in readers:
            readers[piece.rank] = objects.Reader(pieces_of(url, export_id, piece.rank))
        disk.read_into(readers[piece.rank], target, piece.begin + offset, str(readers[piece.rank].url))

    with upload.Upload(url / file.name, file.bytes) as out:
        out.put(memoryview(file.header), 0)
        done = len(file.header)
        for name, place in sorted(file.places.items(), key=lambda item: item[1].begin):
            for block in _blocks(place, where[name], read):
                out.put(block, done)
                done += len(block)


def _blocks(place: Stored, held: list[_Piece], read: Callable[[_Piece, int, memoryview], None]) -> Iterator[memoryview]:
    """The bytes of a tensor in file order: block by block if each piece is one contiguous range, else all at once."""
    item = layout.ITEM_BYTES[place.dtype]
    stretches = [(layout.only_run(place.shape, piece.box, item), piece) for piece in held]
    if all(run is not None for run, _ in stretches):
        for run, piece in sorted(stretches, key=lambda entry: entry[0] or (0, 0)):
            length = run[1] if run else 0
            for low in range(0, length, disk.BLOCK_BYTES):
                block = memoryview(bytearray(min(disk.BLOCK_BYTES, length - low)))
                read(piece, low, block)
                yield block
        return
    whole = memoryview(bytearray(place.bytes))
    for piece in held:
        done = 0
        for offset, length in layout.runs(place.shape, piece.box, item):
            read(piece, done, whole[offset : offset + length])
            done += length
    yield from (whole[low : low + disk.BLOCK_BYTES] for low in range(0, place.bytes, disk.BLOCK_BYTES))


def put_files(url: Url, write: Callable[[Path], Any]) -> None:
    """Upload the files that `write` creates in a folder. On rank 0."""
    with tempfile.TemporaryDirectory(prefix="shardkit-export-") as folder:
        write(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            objects.put(url / path.name, path.read_bytes())


def publish(url: Url, stem: str, files: Sequence[ExportFile]) -> None:
    """On rank 0: commit the export: upload the index of several files, and delete the files of an earlier export."""
    kept = {file.name for file in files}
    if len(files) > 1:
        objects.put(url / export.index_name(stem), export.index_of(files))
        kept.add(export.index_name(stem))
    for name in export.stale(objects.names(url), stem, kept):
        objects.remove(url / name)


def discard(url: Url, export_id: str, files: Sequence[ExportFile] = ()) -> None:
    """On rank 0: delete the pieces, and the given files, which are in no index."""
    objects.remove(url / f"{export.TEMPORARY}{export_id}")
    for file in files:
        objects.remove(url / file.name)
