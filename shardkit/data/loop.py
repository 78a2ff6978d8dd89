"""One iteration over a prepared loader: its position, its current batch, and what optimizer steps have used."""

from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch.utils._pytree import tree_leaves

from shardkit.data.position import Position
from shardkit.data.sources import Piece

_yields = count(1)


@dataclass
class Loop:
    """One iteration over a prepared loader. The current batch is the one that was yielded last."""

    position: Position
    outer: "Loop | None" = None
    """The enclosing loop over the same loader."""
    batch_samples: int = 0
    """Samples in the current global batch, without padding."""
    is_last: bool = False
    is_padded: bool = False
    last_yield: int = 0
    began: int = field(default_factory=lambda: next(_yields))
    """The value of the yield counter, shared by all loaders, when the loop began."""
    local_samples: int | None = None
    """Samples in this rank's current batch; None where its tensors have different lengths."""
    tensors: list[ReferenceType[torch.Tensor]] = field(default_factory=list)
    """The tensors of this rank's current batch."""
    is_open: bool = True
    is_finished: bool = False
    """Whether it reached the end of its epoch; its position is then the start of the next one."""
    is_unused: bool = False
    """Whether no optimizer step has used the current batch."""
    steps: int = 0
    """Optimizer steps that used its batches."""
    newest_at_step: int = 0
    """`last_yield` of the newest batch of any loader at the last step that used a batch of this loop."""
    inner: int = 0
    """Number of loops over the same loader begun inside this one."""
    has_inner_ended: bool = False
    """Whether one of them finished after the current batch was yielded."""

    def take(self, piece: Piece) -> None:
        """Makes this the current batch."""
        before = self.position
        self.position = Position(before.epoch, before.samples + piece.samples, piece.state, before.order)
        self.batch_samples, self.is_last, self.is_padded = piece.samples, piece.is_last, piece.is_padded
        self.is_unused, self.has_inner_ended = True, False
        self.last_yield = next(_yields)

    def given(self, batch: Any) -> Any:
        """The batch, with its tensors and length noted."""
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self.tensors = [ref(tensor) for tensor in tensors]
        lengths = {len(tensor) for tensor in tensors if tensor.dim()}
        self.local_samples = lengths.pop() if len(lengths) == 1 else None
        return batch
