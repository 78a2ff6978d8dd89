"""State of a model that is no parameter or buffer: extra state, and what its hooks and methods make of a state dict.

A load reads parameters and buffers directly into their memory. A model that has more then gets its whole state dict
through `load_state_dict`, so that `set_extra_state`, load hooks and overridden methods are called as in torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardkit.distributed.modules import clean_name, unwrapped
from shardkit.distributed.tensors import local_part
from shardkit.errors import CheckpointError
from shardkit.wording import first_few

_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


@dataclass
class CustomState:
    """What a load gives to one model's `load_state_dict` beside its parameters and buffers."""

    model: nn.Module
    section: str
    tensors: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """{name: (its name in the checkpoint, the present tensor)} of those that are no memory of the model."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The present values that are no tensors."""


def detached_names(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The names of the tensors of a state dict that are no parameter or buffer of the model, nor share its memory."""
    inner = unwrapped(model)
    live = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    names, memory = {clean_name(name) for name, _ in live}, {_memory_of(tensor) for _, tensor in live}
    empty = {name for name, tensor in tensors.items() if not tensor.numel() and name in names}
    return {name for name, tensor in tensors.items() if _memory_of(tensor) not in memory} - empty


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = local_part(tensor)
    if local.is_meta or local.device.type == "xla":  # without an address; such a tensor is taken for the model's
        return ()
    return local.data_ptr(), tuple(tensor.shape), local.stride(), tensor.dtype


def may_resize(model: nn.Module, name: str) -> bool:
    """Whether the module that has this tensor may give it another shape when it is loaded: by a
    `_load_from_state_dict` or a load hook of its own."""
    owners = {clean_name(fqn): module for fqn, module in unwrapped(model).named_modules(remove_duplicate=False)}
    owner = owners.get(name.rpartition(".")[0])
    if owner is None:
        return False
    return _is_own(owner._load_from_state_dict) or bool(_own_pre_hooks(owner))


def is_customized(model: nn.Module) -> bool:
    """Whether the model has load hooks or loading methods of its own, not torch's."""
    return any(_is_own(call) for module in unwrapped(model).modules() for call in _calls(module))


def has_load_hooks(model: nn.Module) -> bool:
    """Whether the model has hooks of its own that change a state dict before it is loaded."""
    return any(_own_pre_hooks(module) for module in unwrapped(model).modules())


def _own_pre_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._load_state_dict_pre_hooks.values() if _is_own(hook)]


def renamed(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """{name in the model: name in a file}, as the model's load hooks rename the tensors of a file.

    The hooks are called as torch does, with tensors without values. A hook that needs values renames nothing here.
    """
    found: dict[str, str] = {}
    marks = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    names = {id(mark): name for name, mark in marks.items()}

    def walk(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for hook in _own_pre_hooks(module):
            hook(state, prefix, {}, False, [], [], [])
        for name in (*module._parameters, *module._buffers):
            old = names.get(id(state.get(prefix + name)))
            if old is not None and old != prefix + name:
                found[prefix + name] = old
        for name, child in module.named_children():
            begin = f"{clean_name(prefix + name)}."
            walk(child, {key: value for key, value in state.items() if key.startswith(begin)}, begin)

    try:
        walk(unwrapped(model), dict(marks), "")
    except Exception:  # in the model's own code, which never sees such tensors otherwise
        return {}
    return found


def _calls(module: nn.Module) -> list[Any]:
    hooks = [hook for kind in _HOOKS for hook in getattr(module, kind).values()]
    return [*(getattr(module, method) for method in _METHODS), *hooks]


def _is_own(call: Callable[..., Any]) -> bool:
    call = getattr(call, "hook", call)  # of torch's wrapper of a hook
    call = getattr(call, "func", call)  # of a functools.partial
    where = getattr(call, "__module__", None) or type(call).__module__
    return not where.startswith(("torch.", "shardkit."))


def load(model: nn.Module, values: Mapping[str, Any], is_strict: bool) -> None:
    """Call `load_state_dict` with the model's own state dict, in which `values` replace those of the same names.

    Raises CheckpointError if it takes no notice of a tensor in `values` that differs from the present one.
    """
    inner = unwrapped(model)
    given = inner.state_dict()
    before = {}
    for name in given:
        if clean_name(name) in values:
            before[name], given[name] = given[name], values[clean_name(name)]
    result: Any = inner.load_state_dict(given, strict=False)
    ignored = [
        name
        for name in getattr(result, "unexpected_keys", ())
        if name in before and not _is_equal(before[name], values[clean_name(name)])
    ]
    if ignored and is_strict:
        raise CheckpointError(
            f"{type(inner).__name__}.load_state_dict does not take {first_few(ignored, 5)}, which its state_dict "
            "returns; give the model a method or hook that loads them, or load with strict=False"
        )


def _is_equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return bool(one == other)
    one, other = local_part(one), local_part(other)
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
