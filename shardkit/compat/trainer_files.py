"""`accelerate.utils.fsdp_utils`: the files that the Transformers Trainer and others save of a sharded model.

`<folder>/pytorch_model_fsdp_0` and `<folder>/optimizer_0` have the names that the Trainer expects. They are shardkit
checkpoints, which load on any number of ranks and with any strategy. The argument `fsdp_plugin` is ignored: the run
has the settings.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit import env
from shardkit.compat.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from shardkit.compat.operations import is_peft_model
from shardkit.distributed.modules import clean_name, every_parameter
from shardkit.errors import CheckpointMissing
from shardkit.runtime.checkpoints import separate_checkpoints


def _folder(folder: str | Path, name: str, number: int) -> Path:
    return Path(folder) / f"{name}_{number}"


@contextmanager
def _saved_under_fsdp(folder: Path) -> Iterator[None]:
    """Says of a folder that is missing which checkpoints have none."""
    try:
        yield
    except CheckpointMissing:
        raise CheckpointMissing(
            f"checkpoint: {folder.parent}: was not saved under FSDP with shardkit (no {folder.name}); resume with the "
            "distributed_type that it was saved with, or begin a new run with its weights: "
            f"from_pretrained({str(folder.parent)!r}), without resume_from_checkpoint."
        ) from None


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save the model; of a peft model with `adapter_only` only the trainable parameters. Collective."""
    only_trained = adapter_only and is_peft_model(model)
    separate_checkpoints.save_only_model(
        accelerator._run, model, _folder(output_dir, FSDP_MODEL_NAME, model_index), only_trained
    )


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a model that `save_fsdp_model` saved with the same `adapter_only`. Collective."""
    only_trained = adapter_only and is_peft_model(model)
    folder = _folder(input_dir, FSDP_MODEL_NAME, model_index)
    with _saved_under_fsdp(folder):
        separate_checkpoints.load_only_model(accelerator._run, model, folder, only_trained)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save the optimizer's state. Collective."""
    folder = _folder(output_dir, OPTIMIZER_NAME, optimizer_index)
    separate_checkpoints.save_only_optimizer(accelerator._run, optimizer, model, folder)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a state that `save_fsdp_optimizer` saved. Collective."""
    folder = _folder(input_dir, OPTIMIZER_NAME, optimizer_index)
    with _saved_under_fsdp(folder):
        separate_checkpoints.load_only_optimizer(accelerator._run, optimizer, model, folder)


def fsdp2_load_full_state_dict(accelerator: Any, model: nn.Module, full_sd: dict[str, Any], *_: Any, **__: Any) -> None:
    """Load rank 0's full state dict into a sharded model. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_sd, options=options)


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """The model, prepared. Collective."""
    return accelerator.prepare_model(model)


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool]:
    """A function that says whether a module is of one of the plugin's block classes."""
    names = set(fsdp2_plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None) or [])
    return lambda module: type(module).__name__ in names


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """The names without the prefixes of torch's wrappers."""
    return {clean_name(name): parameter for name, parameter in named_params.items()}


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any = None) -> set[nn.Parameter]:
    """The parameters of the given modules, or of those whose names match a regular expression."""
    if isinstance(modules, str):
        modules = [module for name, module in model.named_modules() if re.fullmatch(modules, name)]
    return {parameter for module in modules or [] for parameter in every_parameter(module)}


def get_grad_scaler(distributed_type: Any = None, **arguments: Any) -> torch.amp.GradScaler:
    """A loss scaler: torch's, for any distributed type."""
    return torch.amp.GradScaler(**arguments)


def get_fsdp2_grad_scaler(**arguments: Any) -> torch.amp.GradScaler:
    """A loss scaler; for FSDP2 that is torch's."""
    return torch.amp.GradScaler(**arguments)


def ensure_weights_retied(param_init_fn: Any, model: nn.Module, device: Any = None) -> Any:
    """The function, unchanged: `prepare` keeps parameters tied."""
    return param_init_fn


def enable_fsdp_ram_efficient_loading() -> None:
    """Make Transformers read weights on one rank only; `prepare` broadcasts them to the others."""
    env.update({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make Transformers read weights on every rank."""
    env.update({"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"})
