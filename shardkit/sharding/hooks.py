"""Gradient hooks that also work for parameters which become trainable later, and that keep no objects alive; and which
kind of backward runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar
from weakref import ref

import torch

from shardkit.distributed.tensors import outside_transforms

Owner = TypeVar("Owner")


def is_in_backward() -> bool:
    """Whether this is called inside a backward pass, for example in a recomputation."""
    return torch._C._current_graph_task_id() != -1


def accumulates() -> bool:
    """Whether the backward that runs leaves gradients in parameters; that of `torch.autograd.grad` returns them. It is
    known from the first call of `track_autograd` on."""
    return _accumulates


def times_returned() -> int:
    """How often `torch.autograd.grad` has returned gradients, which a script may assign to parameters."""
    return _times_returned


_accumulates, _times_returned = True, 0


@cache
def track_autograd() -> None:
    """Lets `accumulates` and `times_returned` know of each backward from now on. Has an effect once per process."""
    wrap_backward(_run_backward)


def wrap_backward(call: Callable[..., Any]) -> None:
    """Has `backward` and `grad` of torch.autograd call `call(run, ...)`, with torch's function `run` and its arguments.
    Has no effect on a torch without this function."""
    if (run := getattr(torch.autograd, "_engine_run_backward", None)) is not None:
        torch.autograd._engine_run_backward = partial(call, run)


def _run_backward(run: Callable[..., Any], *arguments: Any, accumulate_grad: bool, **more: Any) -> Any:
    """A backward may run inside another."""
    global _accumulates, _times_returned
    around, _accumulates = _accumulates, accumulate_grad
    _times_returned += not accumulate_grad
    try:
        return run(*arguments, accumulate_grad=accumulate_grad, **more)
    finally:
        _accumulates = around


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
