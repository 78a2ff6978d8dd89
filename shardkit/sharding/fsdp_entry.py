"""Entering an FSDP2 unit through any of its modules, or another method than forward: `model.embed(x)`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import update_wrapper
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from shardkit.sharding.fsdp_internals import groups_of, modules_below, root_of, states_of
from shardkit.sharding.fsdp_recovery import recover_if_broken_off, recover_if_raised
from shardkit.sharding.fsdp_unit import UnitState
from shardkit.sharding.outputs import LeftOnModules, without_views


def finish(model: nn.Module, compiled: Iterable[nn.Module] = ()) -> None:
    """The last step of sharding a model: sets its root, and lets its units be entered through any of their modules.

    torch takes the first unit that runs forward as the root. Modules inside `compiled` ones are not changed.
    """
    root = root_of(model)
    root._lazy_init()
    model.register_forward_pre_hook(lambda module, args: recover_if_broken_off(root), prepend=True)
    model.register_forward_hook(lambda module, args, output: recover_if_raised(root), always_call=True)
    for state in states_of(model):
        for group in groups_of(state):
            if group._reshard_after_forward:
                group._left = LeftOnModules([*state._modules, *modules_below(state)])
    inside_compiled = {id(inner) for module in compiled for inner in module.modules()}
    for state in states_of(model):
        for module in (*(state._modules if groups_of(state) else ()), *modules_below(state)):
            if id(module) not in inside_compiled and not _is_entry(module.__dict__.get("forward"), state):
                module.forward = _Entry(module, state)


def enter_by(model: nn.Module, name: str) -> None:
    """Makes a method of the model gather the unit's parameters as forward does."""
    (state,) = [one for one in states_of(model) if model in one._modules]
    if groups_of(state) and not isinstance(getattr(model, name), _Entry):
        setattr(model, name, _Entry(model, state, name))


class _Entry:
    """Wraps a method (usually forward) of a module inside a unit. It enters the unit if no caller has: in a call such
    as `model.embed(x)` the module's parameters are gathered, and its gradients are reduced."""

    def __init__(self, module: nn.Module, state: UnitState, name: str = "forward") -> None:
        self._module, self._state, self._name, self._forward = module, state, name, getattr(module, name)
        self.group = groups_of(state)[0]
        update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.group._sharded_state is ShardedState.UNSHARDED:
            return self._forward(*args, **kwargs)
        args, kwargs = self._state._pre_forward(self._module, args, kwargs)
        try:
            output = without_views(self._forward(*args, **kwargs))
            return self._state._post_forward(self._module, args, output)
        finally:
            recover_if_raised(self._state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is not part of the unit, so it gets the method of its class."""
        copied = memo.get(id(self._module))
        return self if copied is None else MethodType(getattr(type(self._module), self._name), copied)


def _is_entry(forward: Any, state: UnitState) -> bool:
    """Whether the forward already enters this unit, itself or around the entry of another unit."""
    while isinstance(forward, _Entry):
        if forward._state is state:
            return True
        forward = forward._forward
    return False
