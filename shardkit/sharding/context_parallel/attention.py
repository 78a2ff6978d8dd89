"""Attention in a region: ranks exchange their slices for heads, so that each computes some of the heads over the whole
sequence (DeepSpeed-Ulysses, arXiv:2309.14509).

It takes two all-to-alls a layer and direction; the attention itself is torch's, with whatever kernel it chooses.
"""

from math import gcd
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from shardkit.errors import UsageError
from shardkit.sharding.context_parallel.groups import ContextGroup

torchs = F.scaled_dot_product_attention


def attention(
    group: ContextGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's `scaled_dot_product_attention` of the whole sequence: (..., heads, own positions, width) of each rank.

    Keys of another length are not slices (cross attention to what every rank has whole), and attended to as they are.
    Collective over the group. Raises UsageError where the heads cannot be divided, or the mask is not that of the whole
    sequence.
    """
    named: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if key.size(-2) != query.size(-2):
        return torchs(query, key, value, attn_mask, enable_gqa=enable_gqa, **named)
    if query.dim() < 3:
        raise UsageError(
            f"context parallelism: attention of one head alone (got queries {list(query.shape)}), which ranks cannot "
            "divide; give scaled_dot_product_attention (samples, heads, positions, width)."
        )
    heads, positions = query.size(-3), query.size(-2)
    if heads % group.size:
        which = "attention heads" if query.dim() > 3 else f"first dim of the queries {list(query.shape)}"
        raise UsageError(
            f"context parallelism: shardkit.mesh.context_size does not divide the {which} (got {group.size} for "
            f"{heads}); choose a divisor of the heads, in (samples, heads, positions, width)."
        )
    key, value = (_divisible(one, heads, group.size, enable_gqa) for one in (key, value))
    mask = None if attn_mask is None else _whole_mask(group, attn_mask, heads, positions)
    query, key, value = _whole_sequences(group, query, key, value)
    found = torchs(query, key, value, mask, enable_gqa=enable_gqa, **named)
    return _own_positions(group, found)


def _divisible(tensor: torch.Tensor, heads: int, size: int, enable_gqa: bool) -> torch.Tensor:
    """Keys or values whose heads the group can divide: those that several heads of the queries share are repeated."""
    own = tensor.size(-3)
    if not enable_gqa:
        return tensor if own == heads else tensor.expand(*tensor.shape[:-3], heads, *tensor.shape[-2:])
    return tensor.repeat_interleave(size // gcd(own, size), -3) if own % size else tensor


def _whole_sequences(group: ContextGroup, *slices: torch.Tensor) -> list[torch.Tensor]:
    """(..., heads, own positions, width) -> (..., own heads, positions, width), in one exchange."""
    by_rank = [one.unflatten(-3, (group.size, -1)).movedim(-4, 0) for one in slices]
    received = _Exchange.apply(torch.cat([one.flatten(1) for one in by_rank], dim=1), group.process_group)
    parts = received.split([one[0].numel() for one in by_rank], dim=1)
    return [part.reshape(sent.shape).movedim(0, -3).flatten(-3, -2) for part, sent in zip(parts, by_rank, strict=True)]


def _own_positions(group: ContextGroup, whole: torch.Tensor) -> torch.Tensor:
    """(..., own heads, positions, width) -> (..., heads, own positions, width)."""
    by_rank = whole.unflatten(-2, (group.size, -1)).movedim(-3, 0)
    received = _Exchange.apply(by_rank.contiguous(), group.process_group)
    return received.movedim(0, -4).flatten(-4, -3)


class _Exchange(torch.autograd.Function):
    """(ranks, ...) -> (ranks, ...): part i goes to rank i of the group. It is its own inverse, and its own backward."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, process_group: Any) -> torch.Tensor:
        ctx.process_group = process_group
        sent = functional.all_to_all_single(parts.contiguous(), None, None, process_group)
        return functional.wait_tensor(sent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Exchange.apply(gradient, ctx.process_group), None


def _whole_mask(group: ContextGroup, mask: torch.Tensor, heads: int, positions: int) -> torch.Tensor:
    """The mask of the whole sequence for this rank's heads."""
    rows, columns, whole = mask.size(-2), mask.size(-1), positions * group.size
    if columns == positions and rows != 1:
        raise UsageError(
            f"context parallelism: attention has a mask of this rank's slice alone (got {list(mask.shape)} for "
            f"{whole} positions); leave the mask out where attention is causal and padding is at the end "
            "(torch.nn's modules: is_causal=True beside the mask, and no key_padding_mask), or give "
            "scaled_dot_product_attention that of the whole sequence."
        )
    if columns == positions:
        mask = _gathered(group, mask, -1)
    if rows == positions:
        mask = _gathered(group, mask, -2)
    if mask.dim() > 2 and mask.size(-3) == heads:
        mask = mask.unflatten(-3, (group.size, -1)).select(-4, group.rank)
    return mask


def _gathered(group: ContextGroup, mask: torch.Tensor, dim: int) -> torch.Tensor:
    """The masks of the group's ranks, joined along a dim."""
    if mask.requires_grad:
        raise UsageError(
            f"context parallelism: attention has a learned mask of a part of the sequence (got {list(mask.shape)}); "
            "give it for the whole sequence."
        )
    return group.gathered(mask, dim)
