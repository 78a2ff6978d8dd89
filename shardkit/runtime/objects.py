"""Small objects of the user's on disk: tensors as safetensors, everything else as JSON; never a pickle."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from shardkit.errors import UsageError


def prepared(value: Any) -> Any:
    """The object with sharded tensors whole. Collective where there are any."""
    if isinstance(value, Mapping):
        return {key: prepared(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(value: Any, path: str | Path) -> None:
    """Write a dict of tensors as safetensors, or anything JSON-able as JSON; the file appears whole or not at all.

    Raises UsageError where the object is neither.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
        # Transformers opens a file only where it is told which library wrote it.
        tensors = {str(key): item.detach().contiguous().clone() for key, item in value.items()}
        save_file(tensors, temporary, metadata={"format": "pt"})
    else:
        temporary.write_text(_json(value, path))
    os.replace(temporary, path)


def _json(value: Any, path: Path) -> str:
    try:
        return json.dumps(value, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"save: {path}: only a dict of tensors (written as safetensors) or JSON-able values can be saved "
            f"(got {type(value).__name__}: {error}); split the object, or use save_model or save_state."
        ) from None
