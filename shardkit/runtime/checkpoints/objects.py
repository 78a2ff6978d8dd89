"""Saves small user objects: tensors as safetensors, everything else as JSON; never as a pickle."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.utils._pytree import tree_leaves, tree_map

from shardkit.checkpoint.files import paths
from shardkit.distributed import xla
from shardkit.distributed.tensors import is_dtensor, whole
from shardkit.errors import CheckpointSaveError, UsageError
from shardkit.wording import words


def gathered(value: Any) -> Any:
    """The object with sharded tensors gathered, also those in dicts and lists. Collective where there are any."""
    return tree_map(lambda item: whole(item) if is_dtensor(item) else item, value)


def has_sharded(value: Any) -> bool:
    """Whether any of its tensors is sharded."""
    return any(is_dtensor(item) for item in tree_leaves(value))


def save(value: Any, path: str | Path, advice: str = "split the object, or use save_model or save_state") -> None:
    """Writes a dict of tensors as safetensors, or JSON values as JSON, atomically. A symlink is followed and kept.

    Raises UsageError with the advice where the object is neither, CheckpointSaveError where the file cannot be written.
    """
    path = paths.on_disk(path, "save", "give a file on a disk")
    if path.is_dir():
        raise UsageError(f"save: {path}: a folder has this name; give the name of a file.")
    if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
        _check(value, path)
        tensors = {str(key): _in_memory(item) for key, item in value.items()}
        _replace(path, lambda temporary: _write_tensors(tensors, temporary, path))
    else:
        text = _json(value, path, advice)
        _replace(path, lambda temporary: temporary.write_text(text))


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose bytes are the values, also of conjugate views."""
    if xla.is_xla(tensor):  # has no memory that safetensors could read
        return xla.to_host(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous().clone()


def _check(tensors: Mapping[Any, torch.Tensor], path: Path) -> None:
    names = [str(key) for key in tensors]
    problems = [f"two names are {name!r} as text" for name in sorted(set(names)) if names.count(name) > 1]
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            problems.append(f"{name}: only dense tensors can be saved (got {tensor.layout})")
        elif tensor.is_meta:
            problems.append(f"{name}: has no values (got a tensor on the meta device)")
    if problems:
        raise UsageError(f"save: {path}: {'; '.join(problems)}; change these first.")


def _write_tensors(tensors: dict[str, torch.Tensor], temporary: Path, path: Path) -> None:
    try:
        # Transformers opens a file only if its metadata has the format.
        save_file(tensors, temporary, metadata={"format": "pt"})
    except KeyError as error:  # how safetensors reports an unknown dtype
        names = ", ".join(name for name, tensor in tensors.items() if tensor.dtype == error.args[0])
        raise UsageError(
            f"save: {path}: {names}: safetensors does not support this dtype (got {error}); convert it."
        ) from None


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        text = f"save: {path}: cannot be written ({words(error)}); fix that, or give another path."
        raise CheckpointSaveError(text) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def _json(value: Any, path: Path, advice: str) -> str:
    try:
        text = json.dumps(value, indent=2, allow_nan=False)
        json.loads(text, object_pairs_hook=_unique)
        return text + "\n"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"save: {path}: only a dict of tensors (written as safetensors) or JSON-able values can be saved "
            f"(got {type(value).__name__}: {error}); {advice}."
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """ValueError where keys such as 1 and "1" became one name."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"two keys are {max(names, key=names.count)!r} as text")
