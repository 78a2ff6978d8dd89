"""Collectives that gradients go through, for losses over the samples of all ranks."""

from typing import Any

import torch

from shardkit.distributed import collectives
from shardkit.distributed.collectives import Beside, refuse_different
from shardkit.distributed.nested import map_tensors


def gather_with_gradients(data: Any, beside: Beside | None = None) -> Any:
    """As `collectives.gather`; a backward gives each rank's tensors the sum of the gradients that all ranks compute for
    them, so every rank must run it. Collective."""
    refuse_different(data, "gather_with_gradients", beside)
    return map_tensors(lambda tensor: _Gather.apply(tensor.reshape(1) if tensor.dim() == 0 else tensor), data)


class _Gather(torch.autograd.Function):
    """(samples of this rank, ...) -> (samples of all ranks, ...)."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        ctx.samples = len(own)
        return collectives.gather_one(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _OwnSum.apply(gradient, ctx.samples)


class _OwnSum(torch.autograd.Function):
    """(samples of all ranks, ...) -> (samples of this rank, ...), summed over the ranks. Its backward is for gradients
    of gradients."""

    @staticmethod
    def forward(ctx: Any, of_all: torch.Tensor, samples: int) -> torch.Tensor:
        start = collectives.rank() * samples if len(of_all) > samples else 0
        return collectives.reduce_one(of_all, "sum").narrow(0, start, samples)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Gather.apply(gradient), None
