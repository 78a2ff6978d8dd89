"""Makes buffers that each rank updates locally (running statistics, codebooks) equal on all ranks."""

from typing import Literal

import torch
import xxhash
from torch import nn

from shardkit.distributed import collectives, control
from shardkit.distributed.modules import clean_name, unwrapped
from shardkit.distributed.tensors import bytes_of, flat_bytes, is_dtensor
from shardkit.errors import UsageError

Reduction = Literal["mean", "rank0"]


def reduce_buffers(model: nn.Module, reduction: Reduction = "mean") -> list[str]:
    """Names of the buffers that differed between ranks; they are set to the mean over ranks, or to rank 0's.

    Integers and booleans always take rank 0's value. Buffers that were equal to the bit are not changed, nor are
    sharded ones. In place. Collective: every rank must call it with the same model. UsageError on all ranks where they
    have different buffers.
    """
    if reduction not in ("mean", "rank0"):
        raise UsageError(f"reduce_buffers: unknown reduction (got {reduction!r}); use mean or rank0.")
    mine, everyone = _plain_buffers(model), control.start()
    kinds = {name: f"{buffer.dtype} {list(buffer.shape)}" for name, buffer in mine.items()}
    summary = [_digest_of(str(kinds).encode()), _digest_of(*map(bytes_of, mine.values()))]
    same_kinds, same_values = everyone.decide(summary, control.are_equal)
    if not same_kinds:
        raise UsageError(everyone.decide(kinds, _difference))
    if same_values:
        return []
    digests = [_digest_of(bytes_of(buffer)) for buffer in mine.values()]
    names = everyone.decide(digests, lambda answers: _differing(list(mine), answers))
    chosen = [mine[name] for name in names]
    with torch.no_grad():
        _average([one for one in chosen if reduction == "mean" and _has_mean(one)])
        _take_rank_0s([one for one in chosen if reduction != "mean" or not _has_mean(one)])
    return names


def _plain_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """All buffers that are not sharded, each once."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"reduce_buffers: not a model (got {type(model).__name__}); use the one from prepare().")
    found = {clean_name(name): buffer for name, buffer in unwrapped(model).named_buffers()}
    return {name: b for name, b in found.items() if not is_dtensor(b) and not b.is_meta and b.numel()}


def _has_mean(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _difference(told: list[dict[str, str]]) -> str:
    rank, other = next((rank, kinds) for rank, kinds in enumerate(told) if kinds != told[0])
    shown = ", ".join(f"{name} {kind}" for name, kind in sorted({*other.items()} ^ {*told[0].items()})[:3])
    return f"reduce_buffers: rank {rank} has other buffers than rank 0 (got {shown}); use the same model on all ranks."


def _differing(names: list[str], told: list[list[str]]) -> list[str]:
    return [name for name, digests in zip(names, zip(*told, strict=True), strict=True) if len({*digests}) > 1]


def _digest_of(*parts: bytes) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _average(buffers: list[torch.Tensor]) -> None:
    """Sets the buffers to their mean over all ranks, in at least fp32; one reduction per device and precision."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for buffer in buffers:
        groups.setdefault((buffer.device, torch.promote_types(buffer.dtype, torch.float32)), []).append(buffer)
    for (_, dtype), group in groups.items():
        parts = [buffer.to(dtype).reshape(-1) for buffer in group]
        mean = collectives.reduce(torch.cat(parts), "mean")
        for buffer, part in zip(group, mean.split([part.numel() for part in parts]), strict=True):
            buffer.copy_(part.view(buffer.shape))


def _take_rank_0s(buffers: list[torch.Tensor]) -> None:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for buffer in buffers:
        groups.setdefault(buffer.device, []).append(buffer)
    for group in groups.values():
        parts = [flat_bytes(buffer) for buffer in group]
        first = collectives.broadcast(torch.cat(parts))
        for buffer, part in zip(group, first.split([part.numel() for part in parts]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
