"""Gradient hooks that also work for parameters which become trainable later, and that keep no objects alive."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import ref

import torch

from shardkit.distributed.tensors import outside_transforms

Owner = TypeVar("Owner")


def is_in_backward() -> bool:
    """Whether this is called inside a backward pass, for example in a recomputation."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def taking_hooks(parameter: torch.Tensor) -> Iterator[None]:
    """Inside, the parameter takes hooks, also if it is frozen: torch registers them on trainable tensors only."""
    is_trained = parameter.requires_grad
    with outside_transforms():
        parameter.requires_grad_(True)
        try:
            yield
        finally:
            parameter.requires_grad_(is_trained)


def hook_whether_trained(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call the hook when a gradient has been accumulated, also if the parameter is frozen now and trainable later."""
    with taking_hooks(parameter):
        parameter.register_post_accumulate_grad_hook(hook)


def is_own(hook: Callable[[torch.Tensor], None]) -> bool:
    """Whether it is shardkit's, by `mark_own`."""
    return getattr(hook, "shardkit_own", False)


def mark_own(hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """The hook, marked as one that may run before a gradient is reduced."""
    vars(hook)["shardkit_own"] = True
    return hook


def hook_weakly(parameter: torch.Tensor, call: Callable[[Owner, torch.Tensor], None], owner: Owner) -> None:
    """As `hook_whether_trained`, with `call(owner, parameter)`, and the hook does not keep the owner alive.

    The garbage collector does not see references from such hooks, so a cycle through one would never be freed.
    """
    reference = ref(owner)

    def hook(gradient_of: torch.Tensor) -> None:
        if (alive := reference()) is not None:
            call(alive, gradient_of)

    hook_whether_trained(parameter, mark_own(hook))
