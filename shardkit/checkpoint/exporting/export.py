"""A whole model in the format that other programs read: safetensors files, with an index if there are several.

Everything is written to a hidden folder inside the target and renamed at the end. A process killed before that leaves
the earlier export complete, and temporary files that the next export removes:

    several files   new files get unused names, the index is replaced atomically, the old files are deleted
    one file        it is replaced atomically, then the files and the index of an earlier export are deleted

A reader that follows Transformers' rule (model.safetensors if it exists, else the files in the index) therefore sees
the old export or the new one, and never a mix. Needs no torch.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit import sizes
from shardkit.checkpoint import faults
from shardkit.checkpoint.files import disk, layout, manifest
from shardkit.checkpoint.files import folder as folders
from shardkit.checkpoint.files.layout import ITEM_BYTES, Stored
from shardkit.checkpoint.saving.additions import PROBE
from shardkit.errors import CheckpointSaveError, UsageError
from shardkit.model.tree import by_numbers

TEMPORARY = ".tmp-export-"
# Dtype names of the safetensors format by the names that users give.
_DTYPES = {"fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16", "bf16": "BF16", "bfloat16": "BF16"}
_DTYPES |= {"fp64": "F64", "float64": "F64"}
_OF_FILES = {".safetensors", ".bin", ".pt", ".pth"}


@dataclass(frozen=True)
class ExportFile:
    """One safetensors file of an export: its name, its header, the place of each tensor, and its size."""

    name: str
    header: bytes
    places: dict[str, Stored]
    bytes: int


@dataclass
class Opened:
    """A running export. `temporary` holds its files, with their headers and final sizes, until `publish`.

    `tag`: the suffix of their names. `made`: the folders that the export created, the innermost first.
    """

    folder: Path
    temporary: Path
    stem: str
    files: list[ExportFile]
    tag: str
    made: list[Path]
    hold: int = -1


def size_in_bytes(size: str | int, caller: str = "max_shard_size") -> int:
    """The bytes of a size such as 5GB (10^9 bytes), 512MiB (2^20) or 500B, or an int of them; UsageError for others."""
    bytes_ = sizes.read_size(size if isinstance(size, str) else f"{size}B")
    if not bytes_:
        raise UsageError(f"{caller}: not a size (got {size!r}); write it with its unit: 5GB, 500MB or 2GiB.")
    return bytes_


def dtype_named(given: object, caller: str) -> str:
    """The safetensors dtype for bf16, float32, torch.bfloat16, ...; UsageError for others."""
    name = str(given).removeprefix("torch.").lower()
    if name not in _DTYPES:
        raise UsageError(f"{caller}: unknown dtype (got {given!r}); use fp32, bf16, fp16 or fp64.")
    return _DTYPES[name]


def folder_named(given: Path, caller: str) -> Path:
    """The folder to export into. UsageError for the name of a file, whose folder would get that name."""
    if given.suffix.lower() in _OF_FILES and not given.is_dir():
        raise UsageError(
            f"{caller}: is a folder, which gets model.safetensors, or several files and their index (got {given}); "
            f"give a folder, such as {given.with_suffix('')}."
        )
    return given


def plan(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    ties: Mapping[str, str],
    max_shard_bytes: int,
    stem: str = "model",
) -> list[ExportFile]:
    """The files for the tensors {name: (dtype, shape)}. A pure function, so all ranks get the same result.

    Tensors are ordered by name, with numbers in names compared as numbers, so that the tensors of a block are
    adjacent. A tensor larger than the limit gets a separate file. `ties`: {further name of a tensor: its name}, which
    go into the header, as in safetensors.
    """
    groups: list[list[str]] = [[]]
    room = max_shard_bytes
    for name in sorted(tensors, key=by_numbers):
        size = layout.bytes_of(*tensors[name])
        if groups[-1] and size > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= size
    count = len(groups)
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.safetensors"]
    return [_file(name, group, tensors, ties) for name, group in zip(names, groups, strict=True)]


def _file(
    name: str, group: Iterable[str], tensors: Mapping[str, tuple[str, Sequence[int]]], ties: Mapping[str, str]
) -> ExportFile:
    ordered = sorted(group, key=lambda key: -ITEM_BYTES[tensors[key][0]])  # widest first: all data is aligned
    metadata = {"format": "pt"} | {alias: kept for alias, kept in ties.items() if kept in ordered}
    head = layout.header(((key, *tensors[key]) for key in ordered), metadata)
    places, begin = {}, len(head)
    for key in ordered:
        dtype, shape = tensors[key]
        places[key] = Stored(dtype, tuple(shape), begin, layout.bytes_of(dtype, shape))
        begin += places[key].bytes
    return ExportFile(name, head, places, begin)


def total_bytes(files: Iterable[ExportFile]) -> int:
    """Bytes of all tensors, without headers."""
    return sum(place.bytes for file in files for place in file.places.values())


def index_name(stem: str) -> str:
    """The name of the index file, which maps tensors to files."""
    return f"{stem}.safetensors.index.json"


def index_of(files: Sequence[ExportFile]) -> bytes:
    """The contents of the index file."""
    where = {name: file.name for file in files for name in file.places}
    index = {"metadata": {"total_size": total_bytes(files)}, "weight_map": dict(sorted(where.items()))}
    return disk.to_json_in_order(index)


def free_tag(files: Sequence[ExportFile], present: Iterable[str]) -> str:
    """A suffix for the names of several files that makes them differ from an earlier export's; empty if they do."""
    taken = len(files) > 1 and not {file.name for file in files}.isdisjoint(present)
    return f"-{uuid.uuid4().hex[:8]}" if taken else ""


def tagged(files: Iterable[ExportFile], tag: str) -> list[ExportFile]:
    """The files with that suffix in their names."""
    return [replace(file, name=file.name.replace(".safetensors", f"{tag}.safetensors")) for file in files]


def begin(folder: Path, files: list[ExportFile], stem: str = "model") -> Opened:
    """Start an export: create its files, without tensor data, in a temporary folder. Several files get names that no
    earlier export has. Raises CheckpointSaveError if the folder cannot be used or lacks space."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointSaveError(f"{folder}: is a file; give a folder.")
    _refuse_checkpoint(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    tag = free_tag(files, names_in(folder))
    opened = Opened(folder, folder / f"{TEMPORARY}{uuid.uuid4().hex[:12]}", stem, tagged(files, tag), tag, made)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean_debris(folder)
        if lack := disk.lack_of_space(folder, total_bytes(files)):
            raise CheckpointSaveError(f"{folder}: {lack}; free some space, or give a folder on another disk.")
        _make_files(opened)
    except BaseException:
        discard(opened)
        raise
    return opened


def _refuse_checkpoint(folder: Path) -> None:
    """An export into a checkpoint would replace the checkpoint's files, or add files that can make it invalid."""
    if manifest.is_checkpoint(folder):
        raise CheckpointSaveError(f"{folder}: is a checkpoint, and an export would damage it; give another folder.")
    if (around := folders.checkpoint_around(folder)) is not None:
        raise CheckpointSaveError(
            f"{folder}: is inside the checkpoint {around}, and an export would damage it; give another folder."
        )


def _make_files(opened: Opened) -> None:
    opened.temporary.mkdir()
    opened.hold = folders.hold(opened.temporary)
    for file in opened.files:
        disk.write_new(opened.temporary / file.name, file.header, file.bytes)
    (opened.temporary / PROBE).touch()
    if len(opened.files) > 1:
        disk.write_new(opened.temporary / index_name(opened.stem), index_of(opened.files))


def publish(opened: Opened) -> None:
    """Rename the finished files to their final names, and remove those of an earlier export. One export into a folder
    after another, or an index would name files of two."""
    with _alone_in(opened.folder):
        _take_free_names(opened)
        _publish(opened)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    descriptor = disk.open_folder(folder)
    try:
        with suppress(OSError):  # the file system may not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _take_free_names(opened: Opened) -> None:
    """Other names, where another export has taken these since `begin`."""
    tag = free_tag(opened.files, names_in(opened.folder))
    if not tag:
        return
    index, before = opened.temporary / index_name(opened.stem), opened.files
    opened.files = tagged(before, tag)
    for old, new in zip(before, opened.files, strict=True):
        os.replace(opened.temporary / old.name, opened.temporary / new.name)
    index.unlink()
    disk.write_new(index, index_of(opened.files))


def _publish(opened: Opened) -> None:
    folder, stem = opened.folder, opened.stem
    weights = [file.name for file in opened.files]
    last = weights[0] if len(weights) == 1 else index_name(stem)  # readers open it first: renaming it is the commit
    present = sorted(path.name for path in opened.temporary.iterdir())
    others = [name for name in present if name not in (*weights, last) and not name.startswith(".")]
    disk.sync_folder(opened.temporary)
    faults.reach("export-publish", 0)
    for name in dict.fromkeys([*(weights if len(weights) > 1 else []), *others, last]):
        os.replace(opened.temporary / name, folder / name)
        faults.reach(f"export-name-{'last' if name == last else 'first'}", 0)
    disk.sync_folder(folder)
    _remove_stale(folder, stem, {*weights, last})
    discard(opened)
    disk.sync_folder(folder)


def _remove_stale(folder: Path, stem: str, kept: set[str]) -> None:
    """Remove the weights of an earlier export."""
    for name in stale(names_in(folder), stem, kept):
        (folder / name).unlink()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def stale(present: Iterable[str], stem: str, kept: set[str]) -> list[str]:
    """Those of the present files that belong to an earlier export; the one that readers open first comes first."""
    part = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}(-[0-9a-f]{{8}})?\.safetensors")
    present = {*present} - kept
    first = [name for name in (f"{stem}.safetensors", index_name(stem)) if name in present]
    return [*first, *sorted(name for name in present if part.fullmatch(name))]


def discard(opened: Opened) -> None:
    """Remove the temporary folder, and folders created for the export if they are empty. May be called twice."""
    shutil.rmtree(opened.temporary, ignore_errors=True)
    if opened.hold >= 0:
        os.close(opened.hold)
        opened.hold = -1
    with suppress(OSError):  # rmdir fails at the first folder that is not empty; its parents are not empty either
        for path in opened.made:
            path.rmdir()


def clean_debris(folder: Path) -> list[Path]:
    """Remove temporary folders of killed exports. Those of running exports stay."""
    removed = []
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(FileNotFoundError):  # another process has just finished its export
            if path.is_dir() and not path.is_symlink() and not folders.is_held(path):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed
