"""A model's weights in safetensors files: each rank reads its part of them."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from shardkit.distributed import custom_state
from shardkit.distributed.collectives import rank
from shardkit.distributed.modules import clean_name, unwrapped
from shardkit.distributed.tensors import put
from shardkit.errors import ModelError
from shardkit.log import get_logger
from shardkit.model.weights import files_in_index, read_header
from shardkit.wording import first_few

log = get_logger(__name__)


def load(model: nn.Module, weights: Path) -> tuple[set[str], list[str]]:
    """Load this rank's part of every parameter and persistent buffer in the files. Returns (fqns loaded, problems).

    A tied parameter may have any of its names in the files; names of torch's wrappers do not count.
    """
    try:
        files = _model_names(model, _where(weights))
    except (OSError, ValueError, RecursionError) as error:
        return set(), [f"{weights}: not readable as safetensors (got {error}); give a .safetensors file or a folder."]
    except ModelError as error:
        return set(), [f"{weights}: {error}"]
    state = {fqn: one for fqn, one in model.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
    there = {fqn: files[clean_name(fqn)] for fqn in state if clean_name(fqn) in files}
    first = {id(state[fqn]): fqn for fqn in reversed(there)}  # of the names of each tensor
    loaded = {fqn for fqn, tensor in state.items() if id(tensor) in first}
    opened = cache(partial(safe_open, framework="pt"))
    detached, of_own_code = custom_state.detached_names(model, state), {}
    problems: list[str] = []
    for fqn in (fqn for fqn in there if first[id(state[fqn])] == fqn):
        name, path = there[fqn]
        if fqn in detached:
            of_own_code[clean_name(fqn)] = opened(path).get_tensor(name)
        elif problem := _read_one(opened(path), name, state[fqn]):
            problems.append(f"{path}: {problem}")
    unused = {name for name, _ in files.values()} - {name for name, _ in there.values()}
    _warn_of_rest(weights, unused, sorted(map(clean_name, {*state} - loaded)))
    return loaded, problems or _load_by_own_code(model, of_own_code, weights)


def _load_by_own_code(model: nn.Module, tensors: dict[str, torch.Tensor], weights: Path) -> list[str]:
    """Load what is no parameter or buffer of the model, where it has any; returns the problem."""
    if not (tensors or custom_state.is_customized(model)):
        return []
    try:
        custom_state.load(model, tensors, is_strict=True)
    except Exception as error:  # in the model's own code
        return [f"{weights}: {type(model).__name__}.load_state_dict failed ({error}); use weights of this model."]
    return []


def _warn_of_rest(weights: Path, unused: set[str], kept: list[str]) -> None:
    """Log that the model keeps its own values of some tensors, which the files lack; they may have another name there
    if some tensors of the files have no place in the model."""
    if not kept or rank() != 0:
        return
    what = f"has {first_few(sorted(unused), 5)}, which the model does not have" if unused else "is not the whole model"
    log.warning("weights: %s: %s; the model keeps its own values of %s.", weights, what, first_few(kept, 5))


def _where(weights: Path) -> dict[str, Path]:
    """The file of each tensor, by the headers of the files: those that the folder's index names, or all."""
    weights = Path(weights)
    paths = (_indexed(weights) or sorted(weights.glob("*.safetensors"))) if weights.is_dir() else [weights]
    if not paths and (weights / "MANIFEST.json").exists():  # its weights may be in parts, in folders
        raise ModelError(
            f"is a checkpoint; accelerator.load_state loads it whole, and shardkit checkpoint merge {weights} -o "
            "FOLDER writes its weights: give that folder."
        )
    if not paths:
        raise FileNotFoundError("a folder without .safetensors files")
    found: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except Exception as error:  # safetensors raises its own exception class, not OSError
            raise OSError(f"{path.name}: {error}") from error
    return found


def _indexed(folder: Path) -> list[Path]:
    """The file that holds all, which Transformers takes first, or those that the index in the folder names; empty if
    there is no index."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices:
        return []
    whole = indices[0].with_name(indices[0].name.removesuffix(".index.json"))
    if whole.is_file():
        return [whole]
    named = files_in_index(json.loads(indices[0].read_text()))
    if named is None:
        raise ValueError(f"{indices[0].name}: weight_map does not name files of this folder")
    return [folder / name for name in sorted(set(named.values()))]


def _model_names(model: Any, files: dict[str, Path]) -> dict[str, tuple[str, Path]]:
    """{name in the model, without torch's wrappers: (name in the file, file)}. Transformers may store a model under
    older names.

    Raises ModelError for tensors that Transformers joins or splits while it loads.
    """
    named = {clean_name(fqn): (fqn, path) for fqn, path in files.items()}
    if custom_state.has_load_hooks(model):
        headers = {path: read_header(path) for path in set(files.values())}
        shapes = {fqn: tuple(headers[path][fqn]["shape"]) for fqn, path in files.items()}
        for new, old in custom_state.renamed(model, shapes).items():
            named[new] = (old, files[old])
    if hasattr(model, "base_model_prefix") and hasattr(model, "save_pretrained"):
        _add_names_of_transformers(named, model, files)
    return named


def _add_names_of_transformers(named: dict[str, tuple[str, Path]], model: Any, files: dict[str, Path]) -> None:
    """Adds the present names of tensors that the files have under older ones. ModelError as above."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # Transformers before 5 stores the model's own names
        return
    mapping = get_model_conversion_mapping(unwrapped(model))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    states = {clean_name(fqn): one for fqn, one in model.state_dict(keep_vars=True).items()}
    computed: dict[str, str] = {}
    for fqn, path in files.items():
        if clean_name(fqn) not in states:
            new, converted = rename_source_key(fqn, renamings, converters, model.base_model_prefix, states)
            if converted is None:
                named.setdefault(new, (fqn, path))
            elif new in states:
                computed.setdefault(new, fqn)
    if lacked := sorted(computed.keys() - named.keys()):
        raise ModelError(
            f"Transformers makes {first_few(lacked, 3)} of other tensors while it loads, which prepare does not (got "
            f"{computed[lacked[0]]}); build the model by from_pretrained(), on rank 0 at least, and prepare it without "
            "weights=, or give weights that accelerator.save_model wrote."
        )


def _read_one(file: Any, fqn: str, target: torch.Tensor) -> str | None:
    """Read a tensor into `target`. Returns the problem, None if there is none."""
    piece = file.get_slice(fqn)
    shape = tuple(piece.get_shape())
    if shape != tuple(target.shape):
        return (
            f"{fqn} has a different shape than in the model (got {shape}, the model has {tuple(target.shape)}); "
            "use weights of this model."
        )
    put(target, lambda slices: piece[slices] if slices is not None else file.get_tensor(fqn))
    return None
