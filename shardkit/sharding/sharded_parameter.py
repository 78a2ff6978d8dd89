"""The class of sharded parameters, which supports loops that assign to `p.data`, and refuses hooks that never run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, local_slices, own_part, sharded_like, whole
from shardkit.errors import UsageError
from shardkit.sharding.parameters import IN_BACKWARD

_data: Any = torch.Tensor.data
_get_data = _data.__get__


class _Whole(torch.autograd.Function):
    """The whole values of a sharded parameter. torch would give each rank the gradient of its own samples."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        ctx.parameter = parameter
        return whole(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mean = gradients[0].contiguous() / dist.get_world_size()
        dist.all_reduce(mean)
        part = mean[local_slices(ctx.parameter)].to(ctx.parameter.device)  # an offloaded one is in host memory
        return sharded_like(part, ctx.parameter)


class ShardedParameter(DTensor):
    """A sharded parameter for which `p.data = values` sets its values.

    torch would accept the assignment, but continue with the old values, which are in the DTensor's local tensor. It is
    created by setting `__class__` of a DTensor; results of operations are ordinary DTensors.
    """

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        return _get_data(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if tuple(values.shape) != tuple(self.shape):
            raise UsageError(
                f"parameter.data = ...: a sharded parameter keeps its shape (got {tuple(values.shape)}, it has "
                f"{tuple(self.shape)}); change shapes before prepare."
            )
        with torch.no_grad():
            if not isinstance(values, DTensor):
                local_part(self).copy_(own_part(values, self))
            elif values.placements == self.placements and values.device_mesh == self.device_mesh:
                local_part(self).copy_(local_part(values))
            else:
                from shardkit.sharding.settled import redistributed

                local_part(self).copy_(local_part(redistributed(values, self.placements)))

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole values, with torch's `grad_placements`; without it their gradient is the mean over all ranks, as
        that of a parameter in forward, and backward is collective."""
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            return _Whole.apply(self)
        return super().full_tensor(grad_placements=grad_placements)

    def register_hook(self, hook: Any) -> Any:
        raise UsageError(
            "parameter.register_hook: would never run, since FSDP itself sets the gradients of sharded parameters; use "
            "register_post_accumulate_grad_hook, change gradients between backward and step, or use strategy NO_SHARD."
        )

    @property
    def _in_backward_optimizers(self) -> list[torch.optim.Optimizer]:
        raise AttributeError  # torch's _apply_optimizer_in_backward asks for it first

    @_in_backward_optimizers.setter
    def _in_backward_optimizers(self, _: Any) -> None:
        raise UsageError(f"parameter: got an optimizer in backward, {IN_BACKWARD}")

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]
