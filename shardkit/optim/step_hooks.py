"""An optimizer's own step, on other tensors than those that its hooks see."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._compile import _disable_dynamo

from shardkit.optim import division
from shardkit.optim.kernels import parameters_of

Chunk: TypeAlias = list[list[torch.Tensor]]
"""Some of the optimizer's parameters, a list for each param group."""


@contextmanager
def with_parameters(optimizer: torch.optim.Optimizer, parameters: Sequence[list[torch.Tensor]]) -> Iterator[None]:
    """Inside, the optimizer's param groups have these parameters, a list for each."""
    groups = optimizer.param_groups
    found = [group["params"] for group in groups]
    try:
        for group, own in zip(groups, parameters, strict=True):
            group["params"] = own
        yield
    finally:
        for group, own in zip(groups, found, strict=True):
            group["params"] = own


@contextmanager
def with_scale_beside(optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[torch.Tensor]]) -> Iterator[None]:
    """Inside, the loss scale that a script's GradScaler has given the fused kernels is in host memory if parameters
    are. torch's own copy does not wait for its end, so that the kernels could read what was there before."""
    found = {name: vars(optimizer)[name] for name in ("grad_scale", "found_inf") if name in vars(optimizer)}
    if found and any(parameter.is_cpu for group in parameters for parameter in group):
        for name, value in found.items():
            setattr(optimizer, name, value.to("cpu") if isinstance(value, torch.Tensor) else value)
    try:
        yield
    finally:
        for name, value in found.items():
            setattr(optimizer, name, value)


def step_between_hooks(
    optimizer: torch.optim.Optimizer,
    inside: Callable[[], AbstractContextManager[None]],
    closure: Callable[[], Any] | None = None,
) -> Any:
    """The optimizer's own step in the context `inside`; returns the closure's result.

    Hooks on the step run outside of the context, so that they see the model's parameters.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    result = None
    with ExitStack() as stack:

        def enter(*_: Any) -> None:
            nonlocal result
            result = run_closure(closure)
            stack.enter_context(inside())

        def leave(*_: Any) -> None:
            stack.close()

        try:
            optimizer._optimizer_step_pre_hooks = OrderedDict({**before, -1: _untraced(enter)})
            optimizer._optimizer_step_post_hooks = OrderedDict({-1: _untraced(leave), **after})
            optimizer.step()
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    return result


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook as it is where the script has compiled the optimizer's step: it finds no sizes in what is traced."""
    return partial(_call_untraced, hook) if "torch._dynamo" in sys.modules else hook  # which it would load


@_disable_dynamo  # once for all hooks: it takes longer than what they do in a step
def _call_untraced(hook: Callable[..., None], *_: Any) -> None:
    hook()


def chunks_of(optimizer: torch.optim.Optimizer, bytes_of: Callable[[torch.Tensor], int], limit: int) -> list[Chunk]:
    """The parameters that have a gradient, in chunks that end with the one that reaches the limit."""
    trained = (p for p in parameters_of(optimizer) if p.grad is not None)
    chosen = division.chunks(((id(p), bytes_of(p)) for p in trained), limit) or [set()]
    return [[[p for p in group["params"] if id(p) in ids] for group in optimizer.param_groups] for ids in chosen]


def step_in_chunks(
    optimizer: torch.optim.Optimizer,
    chunks: Callable[[], list[Chunk]],
    inside: Callable[[Chunk], AbstractContextManager[None]],
    closure: Callable[[], Any] | None = None,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """The optimizer's own step for one chunk of parameters after the other, each in the context `inside`; returns the
    closure's result. `chunks`: as of `chunks_of`, asked once the hooks before the step and the closure have run. All
    chunks are in the context `around`, hooks are not."""

    @contextmanager
    def on_last() -> Iterator[None]:
        *others, last = chunks()
        with around():
            for chunk in others:
                with inside(chunk):
                    _step_without_hooks(optimizer)
            with inside(last):
                yield

    return step_between_hooks(optimizer, on_last, closure)


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """The step of the optimizer's class, without what torch puts around it: hooks, also those of all optimizers."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def run_closure(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
