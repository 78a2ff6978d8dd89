"""Accelerate's hooks around a module's forward."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import update_wrapper
from typing import Any

import torch
from torch import nn


class ModelHook:
    """A hook around a module's forward."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added. Returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called before forward. Returns its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after forward. Returns its result."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed. Returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, in this order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run the hook around the module's forward. It replaces an earlier hook; with `append` it runs after it."""
    if append and getattr(module, "_hf_hook", None) is not None:
        before: Any = module._hf_hook
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    else:
        remove_hook_from_module(module)
    plain: Callable[..., Any] = module.forward
    hook.init_hook(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = plain(*args, **kwargs)
        return hook.post_forward(module, output)

    module._hf_hook, module._old_forward = hook, plain  # type: ignore[assignment]
    module.__dict__["_own_forward"] = module.__dict__.get("forward")
    module.forward = update_wrapper(forward, plain)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """The module without its hook."""
    if "_hf_hook" in module.__dict__:
        module._hf_hook.detach_hook(module)  # type: ignore[operator, union-attr]
        del module.__dict__["_hf_hook"], module.__dict__["_old_forward"], module.__dict__["forward"]
        if (own := module.__dict__.pop("_own_forward")) is not None:
            module.forward = own  # one that the script has set
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Removes all hooks, of the modules inside too."""
    remove_hook_from_module(module, recurse=True)
