"""`copy.deepcopy` of a sharded model, or of a part of it: a plain one with whole weights, on every rank.

So a script keeps its best model, exports it, or averages weights, as with a model of one device. The copy has what the
script has set on the modules, but nothing of FSDP's. `prepare` shards it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.utils import parametrize

from shardkit.distributed import named_barrier
from shardkit.distributed.tensors import is_composed, is_dtensor, local_part, outside_inference_mode, whole
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding import parameters
from shardkit.sharding.fsdp.internals import own_class
from shardkit.sizes import in_words

log = get_logger(__name__)

_CALL = "copy.deepcopy"
# From this size on a copy is logged: it may be more than fits beside the shards.
LARGE = 2**30
# What these define on a module is of its sharding.
_SHARDING = ("shardkit.sharding.", "torch.distributed.fsdp.")
# What fully_shard itself notes on a module, beside its hooks.
_NOTES = ("__composable_api_state_key_", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


class DeepCopy:
    """The `__deepcopy__` of one module with sharded parameters inside. Collective: it gathers them, tensor by tensor.

    `timeout_s`: how long a rank waits for the others; then UsageError. `then` is called with the copy of the module.
    """

    def __init__(self, module: nn.Module, timeout_s: float, then: Callable[[nn.Module], None] | None) -> None:
        self._module, self._timeout_s, self._then = module, timeout_s, then

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        kind = own_class(type(self._module))
        copier = getattr(kind, "__deepcopy__", None)
        if copier is not None and copier.__module__ != parametrize.__name__:
            raise UsageError(
                f"{_CALL}: a {kind.__name__} copies itself, which it cannot once it is sharded (got a prepared model); "
                "copy it before prepare."
            )
        self._gather(memo)
        copied = memo[id(self._module)] = kind.__new__(kind)
        copied.__setstate__({name: deepcopy(value, memo) for name, value in _of_script(self._module)})
        if self._then is not None:
            self._then(copied)
        return copied

    @torch.no_grad()
    @outside_inference_mode()
    def _gather(self, memo: dict[int, Any]) -> None:
        """Puts the whole tensors into the memo. A copy of a module around this one has done so already."""
        sharded = [one for one in _tensors(self._module) if is_dtensor(one)]
        if any(is_dtensor(memo.get(id(one))) for one in sharded):
            raise UsageError(
                f"{_CALL}: parameters that are copied before their model stay sharded (got an object that has both); "
                "copy the model alone."
            )
        if composed := [one for one in sharded if is_composed(one)]:
            kind = type(local_part(composed[0])).__name__
            raise UsageError(
                f"{_CALL}: a sharded model with quantized weights of this class cannot be copied (got {kind}); copy it "
                "before prepare, or save its adapters: accelerator.save_model(model, folder)."
            )
        tensors = [one for one in sharded if id(one) not in memo]
        if not tensors:
            return
        named_barrier.meet(_CALL, self._timeout_s, UsageError)
        size = sum(one.nbytes for one in tensors)
        if size >= LARGE:
            name = type(self._module).__name__
            log.info("%s: each rank has %s of %s; prepare shards the copy, too.", _CALL, in_words(size), name)
        for one in tensors:
            if id(one) not in memo:  # tied
                value = whole(one).to(local_part(one).device, copy=True)
                is_parameter = isinstance(one, nn.Parameter)
                memo[id(one)] = parameters.whole_like(one, value) if is_parameter else value


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for inner in module.modules():
        yield from (one for one in (*inner._parameters.values(), *inner._buffers.values()) if one is not None)


def _of_script(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's attributes, without what sharding has put among them."""
    # A parametrized module refuses to be pickled, and is copied without: torch's __deepcopy__ does so.
    found = vars(module) if parametrize.is_parametrized(module) else module.__getstate__()
    state = {name: value for name, value in found.items() if not name.startswith(_NOTES)}
    hooks = {name: value for name, value in state.items() if "_hooks" in name and isinstance(value, dict)}
    dropped = {number for found in hooks.values() for number, hook in found.items() if _is_of_sharding(hook)}
    for name, value in state.items():
        if name in hooks:
            yield name, type(value)((number, one) for number, one in value.items() if number not in dropped)
        elif not _is_of_sharding(value):
            yield name, value
        elif (inner := _inside(name, value, module)) is not None:
            yield name, inner


def _is_of_sharding(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and any(home.startswith(_SHARDING) for home in _homes(value))


def _homes(value: Any) -> tuple[str, ...]:
    """The modules that define a function or the class of an object. A wrapper names the function inside as its own:
    of one around a script's method only the code is of sharding, of torch's no_grad around ours only the name."""
    match value:
        case partial():
            return _homes(value.func)
        case MethodType():
            return _homes(value.__func__)
        case _WrappedHook():
            return _homes(value.hook)
        case FunctionType():  # one that a script has made by exec may have no module
            return str(value.__globals__.get("__name__")), str(value.__module__)
    return (type(value).__module__,)


def _inside(name: str, wrapper: Any, module: nn.Module) -> Any:
    """The method that sharding has wrapped, if the script has set it; None for one of the class."""
    while _is_of_sharding(wrapper):
        inner: Any = getattr(wrapper, "__wrapped__", None)
        is_method = isinstance(wrapper, MethodType) and isinstance(inner, FunctionType)
        wrapper = MethodType(inner, module) if is_method else inner
    return None if getattr(wrapper, "__func__", wrapper) is getattr(type(module), name, None) else wrapper
