"""A region of a script in which sequences are split over the ranks of a context group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardkit.distributed import control
from shardkit.distributed.nested import leaves, map_leaves
from shardkit.errors import UsageError
from shardkit.sharding.context_parallel import torch_functions
from shardkit.sharding.context_parallel.groups import ContextGroup

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

    def __init__(self, group: ContextGroup, everyone: control.ControlGroup) -> None:
        self.group = group
        self.slices: list[Slice] = []
        """Of the present region, or of the last one, which a backward may recompute."""
        self.everyone = everyone
        self._left_to_compare = COMPARED
        self._is_inside = False
        torch_functions.note_forward(None)  # the last one was of another run of this process
        torch_functions.call_at_unwatched(None)
        if group.size > 1:
            torch_functions.install()

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()  # in the pickle of a model, whose forwards ask for it

    @contextmanager
    def split(self, data: Sequence[Any], dim: int) -> Iterator[list[Any]]:
        """Inside, attention and the cross entropy are those of whole sequences. Yields the data with this rank's slices
        of its tensors along `dim`; those with fewer dims whole, as the group's first rank has them; and what is no
        tensor as it is. Collective."""
        if self.group.size == 1:
            yield list(data)
            return
        tensors = [leaf for leaf in leaves(list(data)) if isinstance(leaf, torch.Tensor)]
        split = [one for one in tensors if -one.dim() <= dim < one.dim()]
        own = {id(one) for one in split}
        kept = [one for one in tensors if id(one) not in own]
        with self._entered(split, [dim % one.dim() for one in split], kept):
            given = {id(tensor): one.own for tensor, one in zip(split, self.slices, strict=True)}
            given |= {id(tensor): self._same(tensor) for tensor in kept}
            yield map_leaves(lambda leaf: given.get(id(leaf), leaf), list(data))

    @contextmanager
    def split_in_place(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], not_restored: Iterable[torch.Tensor]
    ) -> Iterator[None]:
        """As `split`, of these tensors along a dim each: inside, they are the slices themselves. Collective."""
        if len(buffers) != len(dims):
            raise UsageError(
                f"maybe_context_parallel: {len(buffers)} buffers have {len(dims)} buffer_seq_dims; give one for each."
            )
        if self.group.size == 1:
            yield
            return
        wholes, kept = [buffer.detach() for buffer in buffers], {id(buffer) for buffer in not_restored}
        with self._entered(wholes, dims):
            self.slices = [replace(one, own=buffer) for one, buffer in zip(self.slices, buffers, strict=True)]
            for one, buffer in zip(self.slices, buffers, strict=True):
                buffer.data = self.group.part(one.whole, one.dim)
            try:
                yield
            finally:
                for whole, buffer in zip(wholes, buffers, strict=True):
                    if id(buffer) not in kept:
                        buffer.data = whole

    @contextmanager
    def _entered(
        self, tensors: Sequence[torch.Tensor], dims: Sequence[int], kept: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Inside, these tensors' slices are those of the region, beside others that are kept whole."""
        if self._is_inside:
            raise UsageError("context_parallel: the script is inside of one already; leave it before the next.")
        if not tensors:
            raise UsageError(
                "context_parallel: no tensor to split (got none with such a dim); give it the tokens, and the labels "
                "and positions that the script has of whole sequences."
            )
        self._compare_shapes([*tensors, *kept])
        for tensor, dim in zip(tensors, dims, strict=True):
            self._refuse_uneven(tensor, dim)
        self.slices = [self._slice(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]
        self._is_inside = True
        try:
            with self.whole_sequences():
                yield
        finally:
            self._is_inside = False

    @property
    def is_active(self) -> bool:
        """Whether attention and losses are those of whole sequences, in a region of this run."""
        return torch_functions.current_group() is self.group

    def whole_sequences(self, *, enabled: bool = True) -> AbstractContextManager[None]:
        """Inside, attention and losses are (or are not) those of whole sequences."""
        return torch_functions.shared_by(self.group if enabled else None)

    def note_forward(self) -> None:
        """Notes a forward with gradients of a prepared model: a backward recomputes it as it was."""
        torch_functions.note_forward(torch_functions.current_group())

    def sum_slices(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of the group's tensors, with gradients; outside of a region the tensor itself. Collective."""
        if not self.is_active:
            return own
        from shardkit.sharding.context_parallel import losses  # not before: what it imports is slow to

        return losses.sum_slices(self.group, own)

    def slice_of(self, tensor: Any) -> Slice | None:
        """What a tensor of the region is a slice of; None for another."""
        return next((one for one in self.slices if one.own is tensor), None)

    def _refuse_uneven(self, tensor: torch.Tensor, dim: int) -> None:
        positions, size = tensor.size(dim), self.group.size
        if positions % size:
            raise UsageError(
                f"context_parallel: a sequence does not divide into {size} slices (got {positions} positions, in dim "
                f"{dim} of {list(tensor.shape)}); pad it, as with pad_to_multiple_of={size} of a tokenizer or collator."
            )

    def _slice(self, tensor: torch.Tensor, dim: int) -> Slice:
        whole = self._same(tensor)
        return Slice(self.group.part(whole, dim), whole, dim)

    def _same(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the group's first rank: what a script draws at random differs between ranks. One with gradients
        is this rank's own."""
        return tensor if tensor.requires_grad else self.group.of_first(tensor)

    def _compare_shapes(self, tensors: Sequence[torch.Tensor]) -> None:
        """UsageError on all ranks where those of a group split tensors of different shapes, in the first regions."""
        if not self._left_to_compare:
            return
        self._left_to_compare -= 1
        shapes, size = [str(list(one.shape)) for one in tensors], self.group.size

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
