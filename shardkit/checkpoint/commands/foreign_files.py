"""The files of a model that Accelerate, Transformers or torch saved, and the tensors in them.

One file, else the files that the index names, else numbered files, which must be complete: with a part missing, or with
parts of two exports beside each other, the model would be another one.
"""

import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.commands import dcp
from shardkit.checkpoint.commands.dcp import LazyTensor
from shardkit.checkpoint.files import disk
from shardkit.checkpoint.states import tensors
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.model.weights import files_in_index
from shardkit.wording import first_few

_NUMBERED = re.compile(r".*-(\d+)-of-(\d+)(-[0-9a-f]{8})?\.\w+")


def weights_of(folder: Path, stem: str) -> tuple[Path, Any] | None:
    """(the file or folder, its content) of the model with this name in a folder; None if there is none."""
    for suffix in ("safetensors", "bin"):
        one, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if one.is_file():
            return one, _content(one)
        if index.is_file():
            where = _named_in(index)
            return folder, _joined(sorted({*where.values()}), where)
        if numbered := sorted(folder.glob(f"{stem}-*-of-*.{suffix}")):
            _refuse_incomplete(folder, numbered)
            return folder, _joined(numbered, {})
    return None


def _named_in(index: Path) -> dict[str, Path]:
    """{name of a tensor: its file}, as the index has it."""
    named = files_in_index(disk.from_json(disk.read_small(index.parent, index.name), f"convert: {index}"))
    if named is None:
        raise CheckpointCorrupted(
            f"convert: {index}: its weight_map does not name files of this folder; it is damaged."
        )
    return {name: index.parent / file for name, file in named.items()}


def _refuse_incomplete(folder: Path, numbered: list[Path]) -> None:
    found = [(int(match[1]), int(match[2])) for path in numbered if (match := _NUMBERED.fullmatch(path.name))]
    counts = {count for _, count in found}
    if len(counts) > 1 or sorted(number for number, _ in found) != [*range(1, max(counts, default=0) + 1)]:
        shown = first_few([path.name for path in numbered], 4)
        raise CheckpointError(
            f"convert: {folder}: the numbered files are not those of one model (got {shown}, and no index); copy the "
            "missing ones, or remove those of another export."
        )


def _joined(files: list[Path], where: dict[str, Path]) -> dict[str, Any]:
    """The tensors of all files."""
    whole: dict[str, Any] = {}
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"convert: {path}: missing, and the index names it; copy it from its source.")
        content = _content(path)
        if not isinstance(content, dict):
            raise CheckpointError(f"convert: {path}: not a dict of tensors (got {type(content).__name__}).")
        for name, tensor in content.items():
            if name in whole:
                raise CheckpointError(
                    f"convert: {path}: {name} is in another file, too; give a folder with one export."
                )
            whole[name] = tensor
    if missing := sorted(where.keys() - whole.keys()):
        raise CheckpointError(
            f"convert: {where[missing[0]]}: does not hold {first_few(missing, 4)}, which the index names; copy the "
            "files from their source again."
        )
    return whole


def _content(path: Path) -> Any:
    return _lazy_tensors(path) if path.suffix == ".safetensors" else load(path)


def _lazy_tensors(path: Path) -> dict[str, LazyTensor]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, LazyTensor] = {}
    try:
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                dtype = tensors.TORCH_DTYPES.get(part.get_dtype(), part.get_dtype())
                found[name] = LazyTensor(dtype, tuple(part.get_shape()), partial(_tensor, path, name))
    except SafetensorError as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(
            f"convert: {path}: not a complete safetensors file ({reason}); copy it from its source again."
        ) from None
    return found


def _tensor(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        return opened.get_tensor(name)


def load(path: Path) -> Any:
    """The contents of a torch.save file, with memory-mapped tensors. Refused if the file holds more than weights."""
    return dcp.load_plain(path, f"convert: {path}", mmap=zipfile.is_zipfile(path))
