"""Gradients that are views of the buckets of torch's DDP, which scripts take for tensors of their own."""

from functools import cache, wraps

import torch


@cache
def take_detach() -> None:
    """Lets scripts zero gradients by `p.grad.detach_()` and `zero_()`: torch refuses to detach views, such as those of
    the reducer's buckets, also where there is nothing to detach. Has an effect once per process."""
    of_torch = torch.Tensor.detach_

    @wraps(of_torch)
    def detach_(tensor: torch.Tensor) -> torch.Tensor:
        try:
            return of_torch(tensor)
        except RuntimeError:
            if tensor.requires_grad or tensor.grad_fn is not None:
                raise
            return tensor

    torch.Tensor.detach_ = detach_  # type: ignore[assignment]
