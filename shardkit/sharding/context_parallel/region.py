"""A region of a script in which sequences are split over the ranks of a context group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from shardkit.distributed import control
from shardkit.distributed.nested import map_leaves
from shardkit.distributed.tensors import flat_bytes
from shardkit.errors import UsageError
from shardkit.sharding.context_parallel.groups import ContextGroup
from shardkit.sharding.hooks import wrap_backward

# Regions in which the ranks of a group compare the shapes that they split.
COMPARED = 3


@dataclass(frozen=True)
class Slice:
    """One of the region's tensors: this rank's part of a whole one, along a dim."""

    own: torch.Tensor
    whole: torch.Tensor
    dim: int


class Region:
    """The regions of one run, one at a time."""

    def __init__(self, group: ContextGroup, everyone: control.ControlGroup, device: torch.device) -> None:
        self.group = group
        self.slices: list[Slice] = []
        """Of the present region."""
        self.everyone, self._device = everyone, device
        self._left_to_compare = COMPARED
        self._is_inside = False
        if group.size > 1:
            _install()

    @contextmanager
    def split(self, data: Sequence[Any], dim: int) -> Iterator[list[Any]]:
        """Inside, attention and the cross entropy are those of whole sequences. Yields the data with this rank's slices
        of its tensors along `dim`; those with fewer dims, and what is no tensor, as they are. Collective."""
        if self.group.size == 1:
            yield list(data)
            return
        if self._is_inside:
            raise UsageError("context_parallel: the script is inside of one already; leave it before the next.")
        self._compare_shapes(data, dim)
        found = map_leaves(lambda value: self._slice(value, dim), list(data))
        self._is_inside = True
        try:
            with self.whole_sequences():
                yield found
        finally:
            self._is_inside = False
            self.slices = []

    @contextmanager
    def split_in_place(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], not_restored: Iterable[torch.Tensor]
    ) -> Iterator[None]:
        """As `split`, of these tensors along a dim each: inside, they are the slices themselves. Collective."""
        if len(buffers) != len(dims):
            raise UsageError(
                f"maybe_context_parallel: {len(buffers)} buffers have {len(dims)} buffer_seq_dims; give one for each."
            )
        wholes, kept = [buffer.detach() for buffer in buffers], [id(one) for one in not_restored]
        with self.split([], 0):
            if self.group.size > 1:
                for buffer, whole, dim in zip(buffers, wholes, dims, strict=True):
                    buffer.data = self._slice(whole, dim)
                    self.slices[-1] = replace(self.slices[-1], own=buffer)
            try:
                yield
            finally:
                for buffer, whole in zip(buffers, wholes, strict=True):
                    if id(buffer) not in kept:
                        buffer.data = whole

    @property
    def is_active(self) -> bool:
        """Whether attention and losses are those of whole sequences."""
        return _current.group is not None

    def whole_sequences(self, *, enabled: bool = True) -> AbstractContextManager[None]:
        """Inside, attention and losses are (or are not) those of whole sequences."""
        return _shared_by(self.group if enabled else None)

    def note_forward(self) -> None:
        """Notes a forward with gradients of a prepared model: a backward recomputes it as it was."""
        _current.of_last_forward = _current.group

    def slice_of(self, tensor: Any) -> Slice | None:
        """What a tensor of the region is a slice of; None for another."""
        return next((one for one in self.slices if one.own is tensor), None)

    def _slice(self, value: Any, dim: int) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() <= dim:
            return value
        if value.size(dim) % self.group.size:
            raise UsageError(
                f"context_parallel: a sequence does not divide into {self.group.size} slices (got {value.size(dim)} "
                f"positions, in dim {dim} of {list(value.shape)}); pad it, as with pad_to_multiple_of="
                f"{self.group.size} of a tokenizer or collator."
            )
        whole = value if value.requires_grad else self._of_first(value)
        found = Slice(self.group.part(whole, dim), whole, dim)
        self.slices.append(found)
        return found.own

    def _of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the group's first rank: what a script draws at random differs between ranks."""
        is_moved = tensor.device.type == "cpu" and not control.takes_host_memory()
        sent = flat_bytes(tensor.to(self._device) if is_moved else tensor).clone()
        dist.broadcast(sent, self.group.first, group=self.group.process_group)
        return sent.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def _compare_shapes(self, data: Sequence[Any], dim: int) -> None:
        """UsageError on all ranks where those of a group split tensors of different shapes, in the first regions."""
        if not self._left_to_compare:
            return
        self._left_to_compare -= 1
        shapes: list[str] = []
        map_leaves(lambda value: shapes.append(str(list(getattr(value, "shape", [])))), list(data))
        size = self.group.size

        def judge(answers: list[list[str]]) -> str | None:
            for first in range(0, len(answers), size):
                own = answers[first : first + size]
                if any(one != own[0] for one in own):
                    got = "; ".join(" ".join(one) for one in own)
                    return (
                        f"context_parallel: ranks {first} to {first + size - 1} share each sequence, but have tensors "
                        f"of different shapes (got {got}); read the batches from a prepared loader, and make what is "
                        "random in their shape the same on these ranks."
                    )
            return None

        if problem := self.everyone.decide(shapes, judge):
            raise UsageError(problem)


class _Current:
    """The groups that share sequences: of what runs now, in any thread, and of the last forward with gradients."""

    group: ContextGroup | None = None
    of_last_forward: ContextGroup | None = None


_current = _Current()


@contextmanager
def _shared_by(group: ContextGroup | None) -> Iterator[None]:
    found, _current.group = _current.group, group
    try:
        yield
    finally:
        _current.group = found


@cache
def _install() -> None:
    """Has torch's functions ask whether they are in a region. They stay, since compiled code keeps the functions that
    it has found: one that asks is compiled for each answer."""
    from shardkit.sharding.context_parallel import attention, losses  # not before: what they import is slow to

    F.scaled_dot_product_attention = _asking(attention.torchs, attention.attention)
    F.cross_entropy = _asking(losses.torchs, losses.cross_entropy)
    torch.backends.mha.set_fastpath_enabled(False)  # of encoders in evaluation, which does without the first function
    wrap_backward(_run_backward)


def _asking(torchs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(torchs)
    def run(*arguments: Any, **named: Any) -> Any:
        if _current.group is None:
            return torchs(*arguments, **named)
        return ours(_current.group, *arguments, **named)

    return run


def _run_backward(run: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """A backward recomputes what was checkpointed, also after the region."""
    with _shared_by(_current.of_last_forward):
        return run(*arguments, **more)
