"""The state of a torch optimizer as it is saved: with parameters named by fqn instead of numbered.

If an optimizer's class overrides `state_dict`, this is called, since some classes keep more state than `state` and
`param_groups` (wrapped optimizers, slow weights). Parameter numbers in the dict, also in nested dicts, are saved as
names. Where a class steps another optimizer (SAM's base optimizer) and does not override `state_dict`, torch would lose
the state of that one: it is saved here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint.states.numbered import numbers_of, with_names
from shardkit.errors import CheckpointError

# Settings of the implementation, and the names that belong to `params`: no state, so a load keeps those of the run.
RUN_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_STANDARD = ("state", "param_groups")


@dataclass(frozen=True)
class OptimizerDescription:
    """An optimizer's whole state: (fqns, settings) of each group, and `rows`, the state of each parameter by fqn."""

    groups: list[tuple[list[str], dict[str, Any]]]
    rows: dict[str, dict[str, Any]]
    globals: dict[str, Any]
    """Entries of `optimizer.state` with string keys, which belong to no parameter."""
    extra: dict[str, Any]
    """Further keys of its overridden state_dict(), or the states of the optimizers that it steps, by attribute."""
    sharded: set[str]
    """The sharded parameters."""
    is_whole: bool = False
    """Whether `extra` is the complete overridden state_dict(), because that does not have torch's format."""


def describe(optimizer: Optimizer, names: Mapping[int, str], section: str) -> OptimizerDescription:
    """The current state. Tensors share memory. Raises CheckpointError if a parameter is in no prepared model."""
    members = [
        [named(parameter, names, f"{section}.param_groups[{number}]") for parameter in group["params"]]
        for number, group in enumerate(optimizer.param_groups)
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {names[id(parameter)] for parameter in parameters if _is_sharded(parameter)}
    if overrides(optimizer, "state_dict"):
        return _described_by_itself(optimizer, members, sharded, section)
    rows = {
        name: _with_text_keys(optimizer.state.get(parameter, {}), f"{section}: state of {name}")
        for name, parameter in ((names[id(parameter)], parameter) for parameter in parameters)
    }
    rest = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    groups = [(those, settings_of(group)) for those, group in zip(members, optimizer.param_groups, strict=True)]
    inner = {name: _inner_state(one, names) for name, one in inner_of(optimizer).items()}
    return OptimizerDescription(groups, rows, _with_text_keys(rest, f"{section}: state"), inner, sharded)


def inner_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that this one steps, by attribute: those that have state of their own for its parameters, which
    its state_dict() lacks."""
    if overrides(optimizer, "state_dict"):
        return {}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        name: one
        for name, one in vars(optimizer).items()
        if isinstance(one, Optimizer)
        and not (overrides(one, "state_dict") or overrides(one, "load_state_dict"))
        and one.state is not optimizer.state
        and own >= {id(parameter) for group in one.param_groups for parameter in group["params"]}
    }


def _inner_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Its state_dict(), with names in place of numbers."""
    members = members_of(optimizer, names)
    state = optimizer.state_dict()
    state["param_groups"] = [settings_of(group) | {"params": group["params"]} for group in state["param_groups"]]
    return dict(with_names(state, members))


def members_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The fqns of each group's parameters."""
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def parameters_by_name(optimizer: Optimizer, names: Mapping[int, str], section: str) -> dict[str, torch.Tensor]:
    """fqn -> parameter, in the order of the groups."""
    return {
        named(parameter, names, section): parameter for group in optimizer.param_groups for parameter in group["params"]
    }


def named(parameter: torch.Tensor, names: Mapping[int, str], where: str) -> str:
    """The fqn of an optimizer's parameter. Raises CheckpointError if no prepared model has it."""
    if id(parameter) not in names:
        shape = list(parameter.shape)
        raise CheckpointError(
            f"{where}: a parameter of shape {shape} is in no prepared model; prepare its model too, or, if it was "
            "removed from its model, leave it out of the optimizer's param_groups."
        )
    return names[id(parameter)]


def is_of_no_parameter(section: str, name: str) -> bool:
    """Whether a saved tensor of an optimizer belongs to no parameter: a setting such as a learning rate, or state of
    the optimizer as a whole."""
    return name.startswith((f"{section}.param_groups[", f"{section}.globals.", f"{section}.extra."))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def overrides(optimizer: Optimizer, method: str) -> bool:
    """Whether it does more than torch's method: by its class, or by hooks. Those of shardkit choose kernels, which are
    no state."""
    hooks = [
        hook
        for when in ("pre", "post")
        for hook in vars(optimizer).get(f"_optimizer_{method}_{when}_hooks", {}).values()
        if not getattr(hook, "__module__", "").startswith("shardkit.")
    ]
    is_own = method in vars(optimizer) or getattr(type(optimizer), method, None) is not getattr(Optimizer, method)
    return is_own or bool(hooks)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in RUN_SETTINGS}


def _with_text_keys(found: Mapping[Any, Any], where: str) -> dict[str, Any]:
    for key in found:
        if not isinstance(key, str):
            raise CheckpointError(f"{where}[{key!r}]: a key of type {type(key).__name__} cannot be saved; use strings.")
    return dict(found)


def _described_by_itself(
    optimizer: Optimizer, members: list[list[str]], sharded: set[str], section: str
) -> OptimizerDescription:
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # only one rank at a time can have its whole state
        raise CheckpointError(
            f"{section}: the state of a ZeroRedundancyOptimizer cannot be saved or loaded; give prepare its inner "
            "optimizer, with strategy SHARD_GRAD_OP, which shards the state as well, or NO_SHARD."
        )
    state = _with_text_keys(optimizer.state_dict(), f"{section}: state_dict()")
    numbers = numbers_of(state, members)
    if numbers is None:
        bare: list[tuple[list[str], dict[str, Any]]] = [(those, {}) for those in members]
        return OptimizerDescription(bare, {}, {}, with_names(state, members), sharded, is_whole=True)
    rows = {
        numbers[key]: _with_text_keys(row, f"{section}: state of {numbers[key]}")
        for key, row in state["state"].items()
        if key in numbers
    }
    rest = {key: value for key, value in state["state"].items() if key not in numbers}
    groups = [(those, settings_of(group)) for those, group in zip(members, state["param_groups"], strict=True)]
    extra = {key: with_names(value, members) for key, value in state.items() if key not in _STANDARD}
    return OptimizerDescription(groups, rows, _with_text_keys(rest, f"{section}: state"), extra, sharded)
