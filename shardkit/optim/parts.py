"""Whole tensors that a script gives for a sharded parameter, as gradient or as state: each rank takes its part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardkit.distributed.tensors import is_dtensor, local_part, own_part, sharded_like, whole
from shardkit.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def sharded_part(value: torch.Tensor, parameter: Any) -> Any:
    """The value with the parameter's device and placements: this rank's part of it, without communication."""
    if not is_dtensor(parameter):
        return value.to(parameter.device)
    mine = own_part(value, parameter).detach().clone().to(local_part(parameter).device)
    return sharded_like(mine, parameter)


def like_parameter(gradient: torch.Tensor, parameter: Any) -> DTensor:
    """The gradient with the placements of its parameter. A plain one of the whole parameter, such as
    `accelerator.reduce(p.grad)` returns, counts as equal on all ranks: each takes its part."""
    if not is_dtensor(gradient):
        return sharded_part(gradient, parameter)
    if gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def make_gradient_plain(parameter: torch.Tensor) -> None:
    """Makes the gradient of a parameter that every rank holds whole a plain tensor: that of a script which joins all
    gradients, changes them and splits them again is a part of a DTensor. Collective where it is one."""
    if is_dtensor(parameter.grad):
        parameter.grad = whole(parameter.grad)


def part_of_whole(value: Any, name: str, parameter: DTensor, tensor: torch.Tensor) -> Any:
    """This rank's part of a plain tensor of the parameter's state: a script may load the state of one process. The
    kernels check no sizes: with another tensor they would read beside it."""
    if not (isinstance(value, torch.Tensor) and value.dim()) or value.shape == tensor.shape:
        return value
    if value.shape != parameter.shape:
        raise UsageError(
            f"optimizer step: {name!r} of a parameter of shape {tuple(parameter.shape)} has another shape (got "
            f"{tuple(value.shape)}); load the state of an optimizer with the same parameters in the same order."
        )
    return torch.empty_like(tensor, dtype=value.dtype).copy_(own_part(value, parameter))


def is_row(row: Any) -> bool:
    """Whether this is a parameter's state, and not another value that the optimizer keeps in its state."""
    return isinstance(row, dict)


def has_shape_of(value: Any, tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of this shape, and no number."""
    return isinstance(value, torch.Tensor) and bool(value.dim()) and value.shape == tensor.shape
