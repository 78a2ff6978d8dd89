"""The names of weights in state dicts, with and without DDP's prefix `module.`: either kind of model takes both."""

from itertools import chain
from typing import Any

from torch import nn


def take_names_of_replicas(model: nn.Module) -> None:
    """Let `load_state_dict` of a model that is not in DDP also take what `state_dict()` of one in DDP gives."""
    model.register_load_state_dict_pre_hook(_without_prefix)


def take_names_of_the_model(replica: nn.Module) -> None:
    """Let `load_state_dict` of a model in DDP also take what `state_dict()` of the model itself gives."""
    replica.register_load_state_dict_pre_hook(_with_prefix)


def _with_prefix(replica: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the names of the inner model in a state dict the prefix of DDP's module, unless they have it."""
    _rename(replica.get_submodule("module"), state_dict, prefix, f"{prefix}module.")


def _without_prefix(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the prefix of DDP's module from the names in a state dict, as that of a trained copy has."""
    _rename(model, state_dict, f"{prefix}module.", prefix)


def _rename(model: nn.Module, state_dict: dict[str, Any], found: str, expected: str) -> None:
    """Replace the prefix `found` in a state dict of the model by `expected`, unless that one is there."""
    names = [name for name, _ in chain(model.named_parameters(), model.named_buffers())]
    if any(expected + name in state_dict for name in names) or not any(found + name in state_dict for name in names):
        return
    for name in [name for name in state_dict if name.startswith(found)]:
        state_dict[expected + name.removeprefix(found)] = state_dict.pop(name)
