"""What sharded parameters carry over: attributes and hooks of the ones that they take the place of.

The new ones are of `sharded_parameter.py`; what becomes of the old ones: `original_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """What a library or a script has noted on a parameter, such as `_no_weight_decay`."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith(("_fsdp", "shardkit"))}


def post_accumulate_hooks_of(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Hooks that run when a gradient has been added."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether `parameter.register_hook` was called: such a hook changes gradients before they are added."""
    return bool(parameter._backward_hooks)


def carry_over(attributes: Mapping[str, Any], to: torch.Tensor) -> None:
    """Set what the old parameter had, where the new one has nothing of this name."""
    for name, value in attributes.items():
        if name not in vars(to):
            setattr(to, name, value)
