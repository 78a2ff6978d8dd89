"""A whole model as other programs open it: safetensors files, with an index where there are several.

Everything is written in a hidden folder inside the target, and gets its names at the end. Whoever is killed before
leaves an earlier export whole, and debris that the next one removes:

    several files   new files get names that are free, the index is replaced in one step, the old files go
    one file        it is replaced in one step, then the files and the index of an earlier export go

A reader that follows Transformers' rule (model.safetensors if it is there, else what the index names) therefore sees
the old export or the new one, and never a mix. Needs no torch.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardkit import sizes
from shardkit.checkpoint import disk, faults, layout, manifest
from shardkit.checkpoint import folder as folders
from shardkit.checkpoint.layout import ITEM_BYTES, Stored
from shardkit.errors import CheckpointSaveError, UsageError

TEMPORARY = ".tmp-export-"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class ExportFile:
    """One safetensors file of an export: its name, the bytes that begin it, and where each tensor goes."""

    name: str
    header: bytes
    places: dict[str, Stored]
    bytes: int


@dataclass
class Opened:
    """An export under way: `temporary` holds its files, sized, with their headers, until `publish`.

    `made` are the folders that did not exist before, the innermost first.
    """

    folder: Path
    temporary: Path
    stem: str
    files: list[ExportFile]
    made: list[Path]
    hold: int = -1


def size_in_bytes(size: str | int) -> int:
    """A size such as 5GB (10^9 bytes), 512MiB (2^20) or a number of bytes; UsageError on anything else."""
    match = _SIZE.fullmatch(str(size))
    bytes_ = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if bytes_ < 1:
        raise UsageError(f"max_shard_size: not a size (got {size!r}); write 5GB, 500MB, 2GiB or a number of bytes.")
    return bytes_


def plan(
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    ties: Mapping[str, str],
    max_shard_bytes: int,
    stem: str = "model",
    tag: str = "",
) -> list[ExportFile]:
    """The files that hold these {name: (dtype, shape)}. A pure function: all ranks that call it agree.

    Tensors stay in the order of their names' numbers, so that a block's lie together; a tensor larger than the limit
    has a file of its own. `ties` are further names of a tensor; they go into the header, as safetensors does it.
    """
    groups: list[list[str]] = [[]]
    room = max_shard_bytes
    for name in sorted(tensors, key=_natural):
        size = _bytes_of(*tensors[name])
        if groups[-1] and size > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(name)
        room -= size
    count = len(groups)
    names = [f"{stem}-{number:05d}-of-{count:05d}{tag}.safetensors" for number in range(1, count + 1)]
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
        places[key] = Stored(dtype, tuple(shape), begin, _bytes_of(dtype, shape))
        begin += places[key].bytes
    return ExportFile(name, head, places, begin)


def _bytes_of(dtype: str, shape: Sequence[int]) -> int:
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def total_bytes(files: Iterable[ExportFile]) -> int:
    """What the tensors take, without headers."""
    return sum(place.bytes for file in files for place in file.places.values())


def index_name(stem: str) -> str:
    """The file that says which file holds which tensor."""
    return f"{stem}.safetensors.index.json"


def index_of(files: Sequence[ExportFile]) -> bytes:
    """The contents of that file."""
    where = {name: file.name for file in files for name in file.places}
    index = {"metadata": {"total_size": total_bytes(files)}, "weight_map": dict(sorted(where.items()))}
    return disk.to_json_in_order(index)


def free_tag(files: Sequence[ExportFile], present: Iterable[str]) -> str:
    """What the names of several files must end with so that none of the present ones, of an earlier export, is one."""
    taken = len(files) > 1 and not {file.name for file in files}.isdisjoint(present)
    return f"-{uuid.uuid4().hex[:8]}" if taken else ""


def begin(folder: Path, files: list[ExportFile], stem: str = "model") -> Opened:
    """An export whose files exist, empty, in a temporary folder. CheckpointSaveError where it cannot be."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointSaveError(f"{folder}: a file has this name; give a folder.")
    _refuse_checkpoint(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    opened = Opened(folder, folder / f"{TEMPORARY}{uuid.uuid4().hex[:12]}", stem, files, made)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean_debris(folder)
        _refuse_without_room(folder, total_bytes(files))
        _make_files(opened)
    except BaseException:
        discard(opened)
        raise
    return opened


def _refuse_checkpoint(folder: Path) -> None:
    """A file within a checkpoint is one of its own, which an export would replace, or a stranger, which damages it."""
    if (folder / manifest.NAME).exists():
        raise CheckpointSaveError(f"{folder}: a checkpoint lives here, and is never written into; give another folder.")
    for around in folder.resolve().parents:
        # Somebody else's file may have the manifest's name, far above.
        if all(os.path.exists(around / name) for name in (manifest.NAME, "index.json")):
            raise CheckpointSaveError(
                f"{folder}: lies in the checkpoint {around}, which is never written into; give another folder."
            )


def _make_files(opened: Opened) -> None:
    opened.temporary.mkdir()
    opened.hold = folders.hold(opened.temporary)
    for file in opened.files:
        disk.write_new(opened.temporary / file.name, file.header, file.bytes)
    (opened.temporary / ".probe").touch()
    if len(opened.files) > 1:
        disk.write_new(opened.temporary / index_name(opened.stem), index_of(opened.files))


def _refuse_without_room(folder: Path, needed: int) -> None:
    free = disk.free_bytes(folder)
    if free < needed:
        text = f"No space left on device: need {sizes.in_words(needed)}, {sizes.in_words(free)} free"
        raise CheckpointSaveError(f"{folder}: {text}; free some, or give a folder elsewhere.")


def publish(opened: Opened) -> None:
    """Give the finished files their names, and remove those of an earlier export."""
    folder, stem = opened.folder, opened.stem
    weights = [file.name for file in opened.files]
    last = weights[0] if len(weights) == 1 else index_name(stem)  # what readers look at first: from now on it is new
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
    """Those of the present files that an earlier export has left; the one that readers look at first comes first."""
    part = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}(-[0-9a-f]{{8}})?\.safetensors")
    present = {*present} - kept
    first = [name for name in (f"{stem}.safetensors", index_name(stem)) if name in present]
    return [*first, *sorted(name for name in present if part.fullmatch(name))]


def discard(opened: Opened) -> None:
    """Remove what is left of the temporary folder, and empty folders made for it. Twice is as good as once."""
    shutil.rmtree(opened.temporary, ignore_errors=True)
    if opened.hold >= 0:
        os.close(opened.hold)
        opened.hold = -1
    with suppress(OSError):  # the first that holds something stays, and so do those around it
        for path in opened.made:
            path.rmdir()


def clean_debris(folder: Path) -> list[Path]:
    """Remove what killed exports left; what is being written right now stays."""
    removed = []
    for path in folder.glob(f"{TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink() and not folders.is_held(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed
