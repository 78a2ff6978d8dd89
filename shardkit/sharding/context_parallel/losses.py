"""Means of the cross entropy (also of `nll_loss`) in a region: over the tokens of the whole sequence, of which slices
have unequal numbers where some are ignored (a prompt, padding)."""

from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from shardkit.sharding.context_parallel.groups import IGNORED, ContextGroup

torchs, torchs_nll = F.cross_entropy, F.nll_loss
torchs_operator: Any = torch._C._nn.cross_entropy_loss
torchs_nll_operator: Any = torch._C._nn.nll_loss_nd
torchs_linear = getattr(F, "linear_cross_entropy", None)
"""With the last layer's product in it; there from torch 2.13 on."""

_NONE, _MEAN = 0, 1
"""torch's numbers of the reductions."""


def cross_entropy(
    group: ContextGroup,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch's `cross_entropy`. A mean over labels is that of the whole sequence, the same on all ranks of the group;
    its gradients, averaged over ranks, are those of one process. Collective over the group."""
    is_mean = reduction == "mean" and size_average is None and reduce is None
    if not is_mean or target.is_floating_point():  # probabilities: none is ignored, and slices are equally long
        return torchs(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    own = torchs(input, target, weight, None, ignore_index, None, "none", label_smoothing)
    return _mean(group, own, target, weight, ignore_index)


def nll_loss(
    group: ContextGroup,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """torch's `nll_loss`, as `cross_entropy`."""
    if reduction != "mean" or size_average is not None or reduce is not None:
        return torchs_nll(input, target, weight, size_average, ignore_index, reduce, reduction)
    own = torchs_nll(input, target, weight, None, ignore_index, None, "none")
    return _mean(group, own, target, weight, ignore_index)


def cross_entropy_loss(
    group: ContextGroup,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The operator that `cross_entropy` calls, for scripts that have imported the function by its name."""
    if reduction != _MEAN or target.is_floating_point():
        return torchs_operator(input, target, weight, reduction, ignore_index, label_smoothing)
    own = torchs_operator(input, target, weight, _NONE, ignore_index, label_smoothing)
    return _mean(group, own, target, weight, ignore_index)


def nll_loss_nd(
    group: ContextGroup,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = IGNORED,
) -> torch.Tensor:
    """The operator that `nll_loss` calls, as `cross_entropy_loss`."""
    if reduction != _MEAN:
        return torchs_nll_operator(input, target, weight, reduction, ignore_index)
    own = torchs_nll_operator(input, target, weight, _NONE, ignore_index)
    return _mean(group, own, target, weight, ignore_index)


def linear_cross_entropy(
    group: ContextGroup,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    **more: Any,
) -> torch.Tensor:
    """torch's `linear_cross_entropy`, as `cross_entropy`."""
    assert torchs_linear is not None
    is_mean = reduction == "mean" and not target.is_floating_point()
    more |= {"weight": weight, "ignore_index": ignore_index, "reduction": "sum" if is_mean else reduction}
    own = torchs_linear(input, linear_weight, target, **more)
    return _mean(group, own, target, weight, IGNORED if ignore_index is None else ignore_index) if is_mean else own


def sum_slices(group: ContextGroup, own: torch.Tensor) -> torch.Tensor:
    """The sum of the group's tensors, the same on all its ranks; its gradients, averaged over ranks, are those of one
    process, where each rank goes on with it alike. Collective over the group."""
    is_small = own.is_floating_point() and own.dtype.itemsize < 4
    return _Sum.apply(own.float() if is_small else own, group).to(own.dtype)


class _Sum(torch.autograd.Function):
    """The sum over a group. Each of its ranks has the gradient of the sum; it counts once for each in the mean over
    ranks."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        ctx.size = group.size
        return functional.wait_tensor(functional.all_reduce(own.contiguous(), "sum", group.process_group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.size, None


def _mean(
    group: ContextGroup, own: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> torch.Tensor:
    """The mean over the whole sequence, from this rank's values or their sum. Its gradient is that of this rank's part
    in it, times the ranks of the group, over which gradients are averaged."""
    dtype, own = own.dtype, own.sum(dtype=torch.promote_types(own.dtype, torch.float32))  # 16 bits would overflow
    is_counted = target != ignored
    counted = is_counted.sum() if weight is None else weight[target.where(is_counted, 0)].where(is_counted, 0).sum()
    sums = torch.stack([own.detach(), counted.to(own.dtype)])
    total, count = functional.wait_tensor(functional.all_reduce(sums, "sum", group.process_group)).unbind()
    part = own * (group.size / count)
    return (part + (total / count - part.detach())).to(dtype)
