"""torch.compile, block by block."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each block in place. Names and classes stay the same, and equal blocks share one compilation."""
    for block in blocks:
        block.compile(backend=backend)
