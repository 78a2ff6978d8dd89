"""The mean cross entropy in a region: over the tokens of the whole sequence, of which slices have unequal numbers where
some are ignored (a prompt, padding)."""

import torch
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as F

from shardkit.sharding.context_parallel.groups import ContextGroup

torchs = F.cross_entropy


def cross_entropy(
    group: ContextGroup,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """torch's `cross_entropy`. A mean over labels is that of the whole sequence, the same on all ranks of the group;
    its gradients, averaged over ranks, are those of one process. Collective over the group."""
    is_mean = reduction == "mean" and size_average is None and reduce is None
    if not is_mean or target.is_floating_point():  # probabilities: none is ignored, and slices are equally long
        return torchs(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    own = torchs(input, target, weight, None, ignore_index, None, "sum", label_smoothing)
    is_counted = target != ignore_index
    counted = is_counted.sum() if weight is None else weight[target.where(is_counted, 0)].where(is_counted, 0).sum()
    sums = torch.stack([own.detach().float(), counted.float()])
    total, count = functional.wait_tensor(functional.all_reduce(sums, "sum", group.process_group)).unbind()
    part = own * (group.size / count).to(own.dtype)
    return part + ((total / count).to(own.dtype) - part.detach())
