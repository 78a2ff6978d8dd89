"""The methods by which an FSDP2 unit is entered, besides the forward of its own module: `model.embed(x)`,
`model.encode(x)`, `step.inverse(z)`."""

from __future__ import annotations

from functools import update_wrapper
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from shardkit.sharding.fsdp.internals import groups_of, modules_below, states_of
from shardkit.sharding.fsdp.outputs import without_views
from shardkit.sharding.fsdp.recovery import recover_if_raised


def register(model: nn.Module, module: nn.Module, name: str) -> None:
    """Makes a method of the model, or of a module inside it, gather the parameters of the module's unit, as forward
    does."""
    for state in states_of(model):
        if any(one is module for one in entrances(state)):
            enter_by(state, module, name)


def entrances(state: Any) -> list[nn.Module]:
    """The modules by which a unit may be entered: those that have parameters of it."""
    return [*(state._modules if groups_of(state) else ()), *modules_below(state)]


def enter_by(state: Any, module: nn.Module, name: str) -> None:
    """Makes a method of the module enter the unit, unless it does so already."""
    if not _enters(module.__dict__.get(name), state):
        setattr(module, name, _Entry(module, state, name))


class _Entry:
    """Wraps a method (usually forward) of a module inside a unit. It enters the unit if no caller has: in a call such
    as `model.embed(x)` the module's parameters are gathered, and its gradients are reduced."""

    def __init__(self, module: nn.Module, state: Any, name: str) -> None:
        inner = getattr(module, name)
        update_wrapper(self, inner)  # first: it copies the attributes of an entry of another unit, too
        self._module, self._state, self._name, self.around = module, state, name, inner
        self.group = groups_of(state)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.group._sharded_state is ShardedState.UNSHARDED:
            return self._run(args, kwargs)
        args, kwargs = self._state._pre_forward(self._module, args, kwargs)
        try:
            output = without_views(self._run(args, kwargs))
            return self._state._post_forward(self._module, args, output)
        finally:
            recover_if_raised(self._state)

    def _run(self, args: Any, kwargs: Any) -> Any:
        self._state._running += 1
        try:
            return self.around(*args, **kwargs)
        finally:
            self._state._running -= 1


def _enters(method: Any, state: Any) -> bool:
    """Whether the method enters this unit already, itself or around the entry of another unit."""
    while isinstance(method, _Entry):
        if method._state is state:
            return True
        method = method.around
    return False
