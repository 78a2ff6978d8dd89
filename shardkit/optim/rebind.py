"""Rebinding of optimizers that were built before their model was sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardkit.distributed.host_memory import device_of_state
from shardkit.distributed.modules import unwrapped
from shardkit.errors import ModelError
from shardkit.optim.kernels import parameters_of
from shardkit.optim.parts import sharded_part
from shardkit.optim.stepping import needs_whole_tensors


@dataclass(frozen=True)
class ParameterNames:
    """Names of a model's parameters before it was parallelized, by id; tied ones have one entry."""

    names: dict[int, str]
    kept: tuple[nn.Parameter, ...]
    """Keeps the old objects alive, so that their ids are not reused. Sharding has freed their storage."""

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        parameters = dict(unwrapped(model).named_parameters())
        return cls({id(p): fqn for fqn, p in parameters.items()}, tuple(parameters.values()))


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether both have the same objects, in the same order. (`==` of two tensors would compare their values.)"""
    return len(one) == len(other) and all(map(is_, one, other))


def present_parameters(names_before: ParameterNames, model_after: nn.Module) -> dict[int, nn.Parameter]:
    """The model's present parameters, by the ids of those that they have replaced."""
    now = dict(unwrapped(model_after).named_parameters(remove_duplicate=False))
    return {identity: now[fqn] for identity, fqn in names_before.names.items() if fqn in now}


def rebind(optimizer: torch.optim.Optimizer, names_before: ParameterNames, model_after: nn.Module) -> None:
    """Rebinds the optimizer to the model's current parameters. Param groups and state are changed in place.

    Existing state is moved along, each rank keeping its part; also to the device of a parameter that is still the same
    object. Parameters of other models are not touched. Raises ModelError, with the optimizer unchanged, where a state
    tensor is neither a number nor of its parameter's shape, or is on the meta device.
    """
    names, present = names_before.names, present_parameters(names_before, model_after)
    state = optimizer.state
    pairs = [(old, present[id(old)]) for old in parameters_of(optimizer) if id(old) in present]
    for old, _ in pairs:
        if old in state:
            _refuse_empty(optimizer, names[id(old)], state[old])
    changed = [(old, new) for old, new in pairs if new is not old]
    moved: dict[torch.Tensor, Any] = {
        new: _moved_state(optimizer, names[id(old)], state[old], new) for old, new in changed if old in state
    }
    for group in optimizer.param_groups:
        group["params"][:] = [present.get(id(p), p) for p in group["params"]]  # LBFGS and others keep this list
    for old, _ in changed:
        state.pop(old, None)
    state.update(moved)
    for _, new in pairs:
        if new in state:
            _move(optimizer, state[new], new)


def _refuse_empty(optimizer: torch.optim.Optimizer, fqn: str, state: dict[str, Any]) -> None:
    """Raises ModelError for a state without values, which Adagrad makes when it is built."""
    empty = [key for key, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if empty:
        raise ModelError(
            f"optimizer: {type(optimizer).__name__} keeps {empty[0]!r} of {fqn} since it was built, when the model had "
            "no values (got a tensor on the meta device); build the optimizer after prepare."
        )


def _moved_state(
    optimizer: torch.optim.Optimizer, fqn: str, state: dict[str, Any], new: nn.Parameter
) -> dict[str, Any]:
    moved = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or _is_number(key, value, new):
            moved[key] = value
        elif tuple(value.shape) == tuple(new.shape):
            moved[key] = sharded_part(value, new)
        elif needs_whole_tensors(optimizer):
            moved[key] = value  # rows and columns
        else:
            raise ModelError(
                f"optimizer: {type(optimizer).__name__} keeps {key!r} of {fqn} in a shape that differs from the "
                f"parameter's (got {tuple(value.shape)}, the parameter has {tuple(new.shape)}), so it cannot be "
                "split; build the optimizer after prepare, or prepare it before its first step."
            )
    _move(optimizer, moved, new)
    return moved


def _is_number(key: Any, value: torch.Tensor, parameter: nn.Parameter) -> bool:
    """Whether it is a count or a factor, which torch's optimizers keep on the CPU."""
    return key == "step" or (value.dim() == 0 and parameter.dim() != 0)


def _move(optimizer: torch.optim.Optimizer, state: dict[str, Any], parameter: nn.Parameter) -> None:
    """State that was on the CPU when the model was moved follows it, in place; LBFGS keeps lists of tensors."""

    def moved(value: torch.Tensor) -> torch.Tensor:
        device = device_of_state(optimizer, parameter, value.dim())
        return value if value.device == device else value.to(device)

    for key, value in state.items():
        if not (isinstance(value, torch.Tensor) and _is_number(key, value, parameter)):
            state[key] = tree_map_only(torch.Tensor, moved, value)
