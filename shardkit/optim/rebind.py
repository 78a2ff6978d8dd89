"""Optimizers that were built before their model was sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardkit.distributed.tensors import is_dtensor, local_part, local_slices, sharded_like, unwrapped
from shardkit.errors import ModelError
from shardkit.optim.local_step import needs_whole_tensors


@dataclass(frozen=True)
class ParameterNames:
    """The parameters of a model before it was parallelized, by identity; tied ones have one entry."""

    names: dict[int, str]
    kept: tuple[nn.Parameter, ...]
    """Keeps the old objects alive, so that no new one gets their identity. Sharding takes their memory away."""

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        parameters = dict(unwrapped(model).named_parameters())
        return cls({id(p): fqn for fqn, p in parameters.items()}, tuple(parameters.values()))


def rebind(optimizer: torch.optim.Optimizer, names_before: ParameterNames, model_after: nn.Module) -> None:
    """Let the optimizer work on the parameters that the model has now. Groups and state are changed in place.

    State that it already has moves along, each rank keeping its part. Parameters of other models stay as they are.
    Raises ModelError, with the optimizer unchanged, where state has neither its parameter's shape nor is a number.
    """
    now = dict(unwrapped(model_after).named_parameters(remove_duplicate=False))
    old = [p for group in optimizer.param_groups for p in group["params"]]
    new = {id(p): now[names_before.names[id(p)]] for p in old if id(p) in names_before.names}
    changed = [p for p in old if id(p) in new and new[id(p)] is not p]
    states = {
        id(p): _moved_state(optimizer, names_before.names[id(p)], optimizer.state[p], new[id(p)])
        for p in changed
        if p in optimizer.state
    }
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(p), p) for p in group["params"]]  # LBFGS and others keep this list
    for parameter in changed:
        optimizer.state.pop(parameter, None)
    for identity, state in states.items():
        optimizer.state[new[identity]] = state


def _moved_state(
    optimizer: torch.optim.Optimizer, fqn: str, state: dict[str, Any], new: nn.Parameter
) -> dict[str, Any]:
    if needs_whole_tensors(optimizer):
        return state
    moved = {}
    for key, value in state.items():
        is_number = not isinstance(value, torch.Tensor) or key == "step" or (value.dim() == 0 and new.dim() != 0)
        if is_number:
            moved[key] = value
        elif tuple(value.shape) == tuple(new.shape):
            moved[key] = _like(value, new)
        else:
            raise ModelError(
                f"optimizer: {type(optimizer).__name__} keeps {key!r} of {fqn} in another shape than the parameter "
                f"(got {tuple(value.shape)}, the parameter has {tuple(new.shape)}), so it cannot be split; "
                "build the optimizer after prepare, or prepare it before its first step."
            )
    return moved


def _like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The value where and as the parameter is: this rank's part of it, without communication."""
    if not is_dtensor(parameter):
        return value.to(parameter.device)
    local = local_part(parameter)
    mine = value[local_slices(parameter)].detach().clone().to(local.device)
    return sharded_like(mine.reshape(local.shape), parameter)
