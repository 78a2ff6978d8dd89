"""What the export of a model contains: its weights, or those of its adapters, and the JSON files beside them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from shardkit.checkpoint.states import state
from shardkit.distributed.modules import clean_name, unwrapped
from shardkit.distributed.tensors import local_part
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage.url import Place
from shardkit.wording import first_few

log = get_logger(__name__)


class WriteConfigs(Protocol):
    """Writes the JSON files beside the weights into a folder. `dtype`: of the weights, if they all have the same."""

    def __call__(self, folder: Path, dtype: torch.dtype | None) -> None: ...


@dataclass
class Part:
    """The contents of one folder."""

    folder: Place
    stem: str
    """How the names of its files begin."""
    tensors: dict[str, torch.Tensor]
    buffers: set[str]
    """Names of the tensors that are buffers: each rank may update its own."""
    ties: dict[str, str]
    """Further names of tensors: {name: the name in `tensors`}."""
    one_file: bool
    write_configs: WriteConfigs


def parts_of(model: nn.Module, folder: Place) -> list[Part]:
    """The weights of a model; of a peft model each of its adapters. CheckpointError for another object."""
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"expected a model (got {type(model).__name__}); give the model that prepare() returned")
    inner: Any = unwrapped(model)
    if hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
        return [_adapter(inner, name, folder) for name in inner.peft_config]
    found, others = state.model_state(model)
    if others:
        log.warning("save_model: extra state that is no tensor is not exported: %s.", first_few(others, 5))
    ties = state.tied_names(model, found)
    whole = {name: tensor for name, tensor in found.items() if name not in ties}
    buffers = {clean_name(name) for name, _ in inner.named_buffers()}
    return [Part(folder, "model", whole, buffers, ties, False, partial(_write_model_config, inner))]


def _adapter(model: Any, adapter: str, folder: Place) -> Part:
    """One adapter of a peft model, in peft's layout: the adapter `default` in the folder, others in subfolders."""
    from peft import get_peft_model_state_dict

    found = state.model_tensors(model)
    # save_embedding_layers="auto" may access the network, and its result may differ between ranks.
    with torch.no_grad():  # for p-tuning peft runs the prompt encoder and saves its output; FSDP gathers in its forward
        chosen = get_peft_model_state_dict(model, state_dict=found, adapter_name=adapter, save_embedding_layers=False)
    _warn_of_left_out(model, chosen)
    buffers = {id(found[name]) for name in map(clean_name, dict(model.named_buffers())) if name in found}
    held_by_rank_0 = {name for name, tensor in chosen.items() if id(tensor) in buffers}
    return Part(
        folder=folder if adapter == "default" else folder / adapter,
        stem="adapter_model",
        tensors=dict(chosen),
        buffers=held_by_rank_0,
        ties={},
        one_file=True,
        write_configs=partial(_write_adapter_config, model, adapter),
    )


def _warn_of_left_out(model: nn.Module, chosen: Mapping[str, torch.Tensor]) -> None:
    """Warn of trained parameters that are not part of an adapter, and so are not saved."""
    saved = {local_part(tensor).data_ptr() for tensor in chosen.values()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and local_part(p).numel()}
    names = [clean_name(name) for name, p in trained.items() if local_part(p).data_ptr() not in saved]
    names = [name for name in names if not any(mark in name for mark in ("lora_", "prompt_encoder", "modules_to_save"))]
    if names:
        log.warning(
            "save_model: trained parameters that are not part of an adapter are not saved: %s; add their modules to "
            "modules_to_save of the peft configuration.",
            ", ".join(names[:5]),
        )


def _write_model_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write config.json and generation_config.json, if the model has them. Errors here are warnings."""
    try:
        config: Any = getattr(model, "config", None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            if hasattr(config, "architectures"):
                config.architectures = [type(model).__name__]
            if hasattr(config, "dtype") and dtype is not None:
                config.dtype = dtype  # the dtype in which from_pretrained loads the weights
            config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
    except Exception as error:  # an error in another library must not prevent saving the weights
        log.warning("save_model: %s: the model's configuration was not written (%s).", folder.parent, error)


def _write_adapter_config(model: Any, adapter: str, folder: Path, dtype: torch.dtype | None) -> None:
    config = copy.deepcopy(model.peft_config[adapter])
    base = model.base_model if config.is_prompt_learning else model.base_model.model
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        kind = type(model.get_base_model())
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)
