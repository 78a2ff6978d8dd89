"""Reads folders of torch.distributed.checkpoint without executing code from them.

`.metadata` is a pickle. It is opened with an unpickler that allows only the classes that DCP writes. The items are
torch.save archives. They are opened with torch's weights-only unpickler.
"""

import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from shardkit.checkpoint.files import disk
from shardkit.checkpoint.files.layout import Box
from shardkit.checkpoint.states import tensors
from shardkit.errors import CheckpointCorrupted, CheckpointError

METADATA = ".metadata"
_FILE = re.compile(r"[A-Za-z0-9_][\w.\-]*")
_OF_DCP = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_KNOWN = {("torch.distributed.checkpoint.metadata", name) for name in _OF_DCP}
_KNOWN |= {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
_KNOWN |= {("torch", "Size"), ("collections", "OrderedDict")}


class LazyTensor:
    """A tensor in another format that is read only when it is written. Has only the methods that `write` calls."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...], read: Any) -> None:
        self.dtype, self.shape, self._read = dtype, shape, read

    def detach(self) -> "LazyTensor":
        return self

    def narrow(self, dim: int, offset: int, size: int) -> "LazyTensor":
        assert (offset, size) == (0, self.shape[dim]), "one rank writes the whole tensor"
        return self

    def to(self, *_: Any) -> torch.Tensor:
        """The tensor itself."""
        return self._read()


class LazyItem:
    """A value that is not a tensor. It is read only if `loaded` is called on it."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return _path_text  # the folder it was saved to; not used
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in it")
        return super().find_class(module, name)


def _path_text(*parts: str) -> str:
    return "/".join(parts)


def is_dcp(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint saved this folder."""
    return (folder / METADATA).is_file()


def read(folder: Path) -> Any:
    """The saved dicts and lists, with a LazyTensor for each tensor and a LazyItem for each other value.

    DCP turns dict keys into strings, and does not store empty dicts and lists.
    """
    where = str(folder / METADATA)
    metadata = _metadata(folder, where)
    places = {_key(index): info for index, info in metadata.storage_data.items()}
    paths = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    whole: dict[Any, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            value: Any = _tensor(folder, name, entry, places)
        elif isinstance(entry, BytesStorageMetadata):
            value = LazyItem(partial(_load, folder, places.get((name, None)), name))
        else:
            raise CheckpointCorrupted(f"{where}: {name}: entry of an unknown type; the file is damaged.")
        _put(whole, paths.get(name, (name,)), value)
    return _with_lists(whole)


def loaded(value: Any) -> Any:
    """A part of what `read` returned, with its LazyItems read."""
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [loaded(item) for item in value]
    return value.read() if isinstance(value, LazyItem) else value


def _metadata(folder: Path, where: str) -> Metadata:
    try:
        found = _Unpickler(io.BytesIO(disk.read_small(folder, METADATA))).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointCorrupted(f"{where}: not a DCP index ({error}); it is damaged or not safe to open.") from None
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointCorrupted(f"{where}: not a DCP index (got {type(found).__name__}); it is damaged.")
    return found


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    return index.fqn, None if index.offset is None else tuple(index.offset)


def _tensor(folder: Path, name: str, entry: TensorStorageMetadata, places: dict[Any, Any]) -> LazyTensor:
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    if sum(box.count for box in boxes) != prod(shape):
        raise CheckpointCorrupted(f"{folder}: {name}: its pieces do not cover the tensor; the checkpoint is damaged.")

    def assemble() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        is_read = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for box in boxes:
            piece = _load(folder, places.get((name, box.offsets)), name)
            if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != box.sizes or piece.dtype != dtype:
                raise CheckpointCorrupted(f"{folder}: {name}: a piece does not match the index; it is damaged.")
            tensors.narrow(whole, box).copy_(piece)
            tensors.narrow(is_read, box).fill_(True)
        if not is_read.all():
            raise CheckpointCorrupted(f"{folder}: {name}: its pieces overlap; the checkpoint is damaged.")
        return whole

    return LazyTensor(dtype, shape, assemble)


def _load(folder: Path, place: Any, name: str) -> Any:
    if place is None or not _FILE.fullmatch(str(place.relative_path)):
        raise CheckpointCorrupted(f"{folder}: {name}: the index has no file for it; the checkpoint is damaged.")
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder}: {name}: compressed or encrypted items are not supported; save without extensions."
        )
    with disk.reading(folder, place.relative_path) as descriptor:
        data = disk.read_at(descriptor, place.offset, place.length, str(folder / place.relative_path))
    return load_plain(io.BytesIO(data), f"{folder / place.relative_path}: {name}")


def load_plain(source: Any, where: str, mmap: bool = False) -> Any:
    """The contents of a torch.save file, read by the weights-only unpickler; CheckpointError if it refuses the file."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged archive can raise anything
        # torch's own message is not shown: it advises to load with weights_only=False, which executes code of the file.
        if refused := re.search(r"GLOBAL (\S+)", str(error)):
            raise CheckpointError(
                f"{where}: holds more than tensors and plain values (got {refused[1]}), which torch's weights-only "
                "unpickler refuses; save only the state_dict, or convert only the model with --weights-only."
            ) from None
        text = "" if isinstance(error, pickle.UnpicklingError) else str(error).partition("\n")[0].partition(". ")[0]
        reason = text.rstrip(".") or "not a torch.save file"
        raise CheckpointCorrupted(
            f"{where}: cannot be read ({reason}); it is damaged or of another format: copy it from its source again."
        ) from None


def _put(whole: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        whole = whole.setdefault(key, {})
    whole[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """The value with lists in place of dicts whose keys are 0, 1, 2, ..."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item) for key, item in value.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == list(range(len(inner))):
        return [inner[number] for number in range(len(inner))]
    return inner
