"""Attributes and hooks that sharded parameters take over from the original ones.

Their classes: that of the sharded ones in `tensors/sharded_parameter.py`, of the original ones in
`original_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from shardkit.sharding import hooks

IN_BACKWARD = (
    "which would never run (got torch's _apply_optimizer_in_backward): FSDP itself sets the gradients of sharded "
    "parameters; step in a hook of register_post_accumulate_grad_hook, or use strategy NO_SHARD."
)


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Attributes that a library or a script has set on a parameter, such as `_no_weight_decay`."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith(("_fsdp", "shardkit"))}


def post_accumulate_hooks_of(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The post-accumulate-grad hooks of a parameter."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def refused_hooks(model: nn.Module) -> list[str]:
    """What is wrong with hooks of the model's parameters under DDP on several ranks."""
    return [
        f"model: {fqn} has a post-accumulate-grad hook, which would run before its gradient is averaged over all "
        "ranks; use a sharded strategy, which runs it afterwards, or remove it."
        for fqn, parameter in model.named_parameters()
        if not all(map(hooks.is_own, post_accumulate_hooks_of(parameter)))
    ]


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether `parameter.register_hook` was called. Such hooks run before a gradient is accumulated."""
    return bool(parameter._backward_hooks)


def carry_over(attributes: Mapping[str, Any], to: torch.Tensor) -> None:
    """Set the attributes of the original parameter on the new one, unless it already has them."""
    for name, value in attributes.items():
        if name not in vars(to):
            setattr(to, name, value)


def note_class(kind: type, on: torch.Tensor) -> None:
    """Note on a sharded parameter the class that the original one had, if it was a library's own."""
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        vars(on)[_CLASS] = kind


def whole_like(sharded: Any, values: torch.Tensor) -> nn.Parameter:
    """A parameter with these whole values, of the class that the sharded one had before. It takes over the memory,
    unless that class copies itself, with what it knows beside the values: its scales, its kind."""
    kind = vars(sharded).get(_CLASS)
    if kind is None:
        return nn.Parameter(values, sharded.requires_grad)
    made = torch.Tensor._make_subclass(kind, values, sharded.requires_grad)
    carry_over(attributes_of(sharded), made)
    return deepcopy(made)


_CLASS = "shardkit_class"
