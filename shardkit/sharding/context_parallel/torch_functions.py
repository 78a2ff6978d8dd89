"""Functions of torch that ask whether they run in a region: attention, and means of losses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints

from shardkit.sharding.context_parallel.groups import ContextGroup
from shardkit.sharding.hooks import wrap_backward


class _Current:
    """The groups that share sequences: of what runs now, in any thread, and of the last forward with gradients."""

    group: ContextGroup | None = None
    of_last_forward: ContextGroup | None = None
    watched: int = 0
    """Forwards of prepared models, and backwards, that run now."""
    on_unwatched: Callable[[ContextGroup], None] | None = None
    """Called at attention outside of those, in a region."""


_current = _Current()


def current_group() -> ContextGroup | None:
    """The group that shares the sequences of what runs now; None outside of a region."""
    return _current.group


def begin_watched() -> None:
    """Notes that a prepared model's forward begins."""
    _current.watched += 1


def end_watched() -> None:
    """Notes that it has ended."""
    _current.watched = max(0, _current.watched - 1)


def call_at_unwatched(call: Callable[[ContextGroup], None] | None) -> None:
    """Has attention of shared sequences call this, outside of prepared models' forwards and of backwards."""
    _current.watched, _current.on_unwatched = 0, call


def note_forward(group: ContextGroup | None) -> None:
    """Notes which group shares the sequences of a forward with gradients: a backward that computes some of it again
    without torch's checkpoint does so as it was."""
    _current.of_last_forward = group


@contextmanager
def shared_by(group: ContextGroup | None) -> Iterator[None]:
    """Inside, attention and losses are those of sequences that this group shares, or of whole ones."""
    found, _current.group = _current.group, group
    try:
        yield
    finally:
        _current.group = found


@cache
def install() -> None:
    """Has torch's functions ask whether they are in a region. They stay, since compiled code keeps the functions that
    it has found: one that asks is compiled for each answer."""
    from shardkit.sharding.context_parallel import attention, losses  # not before: what they import is slow to

    _replace(attention.torchs, _noting(_asking(attention.torchs, attention.attention)))
    _replace(losses.torchs, _asking(losses.torchs, losses.cross_entropy))
    torch._C._nn.cross_entropy_loss = _asking(losses.torchs_operator, losses.cross_entropy_loss)
    _replace(losses.torchs_nll, _asking(losses.torchs_nll, losses.nll_loss))
    torch._C._nn.nll_loss_nd = _asking(losses.torchs_nll_operator, losses.nll_loss_nd)
    if losses.torchs_linear is not None:
        _replace(losses.torchs_linear, _asking(losses.torchs_linear, losses.linear_cross_entropy))
    torch.backends.mha.set_fastpath_enabled(False)  # of encoders in evaluation, which does without the first function
    frame, function = checkpoints._CheckpointFrame, checkpoints.CheckpointFunction
    frame.__init__ = _keeping_group(frame.__init__)  # type: ignore[method-assign]
    function.forward = staticmethod(_keeping_group(function.forward))  # type: ignore[method-assign]
    wrap_backward(_run_backward)


def _replace(torchs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Has torch.nn.functional, and the modules that have imported the function from there, call another one."""
    setattr(F, torchs.__name__, ours)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "shardkit"):
            for own in [key for key, value in getattr(module, "__dict__", {}).items() if value is torchs]:
                setattr(module, own, ours)


def _noting(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Attention that notes a forward also of a model that was not prepared."""

    @wraps(attention)
    def run(query: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled() and query.requires_grad:
                _current.of_last_forward = _current.group
            if _current.group is not None and _current.on_unwatched is not None and not _current.watched:
                _current.on_unwatched(_current.group)
        return attention(query, *arguments, **named)

    return run


def _asking(torchs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(torchs)
    def run(*arguments: Any, **named: Any) -> Any:
        if _current.group is None:
            return torchs(*arguments, **named)
        return ours(_current.group, *arguments, **named)

    return run


def _keeping_group(begin: Callable[..., Any]) -> Callable[..., Any]:
    """What begins a checkpoint of torch's, as `begin(its own object, function, ...)`: the function runs again, in a
    backward, with the sequences shared as they are now. Both that exist are replaced, not `checkpoint`, which models
    may hold already."""

    @wraps(begin)
    def run(own: Any, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        group = _current.group

        def as_now(*arguments: Any, **named: Any) -> Any:
            with shared_by(group):
                return function(*arguments, **named)

        return begin(own, as_now, *arguments, **named)

    return run


def _run_backward(run: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """A backward, also after the region, computes attention and losses as the last forward did."""
    begin_watched()
    try:
        with shared_by(_current.of_last_forward):
            return run(*arguments, **more)
    finally:
        end_watched()
