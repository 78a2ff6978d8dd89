"""The class of sharded parameters, which supports loops that assign to `p.data`, and refuses hooks that never run."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import (
    local_part,
    memory_of,
    outside_inference_mode,
    own_part,
    sharded_like,
    whole,
)
from shardkit.errors import UsageError
from shardkit.sharding.parameters import IN_BACKWARD

_data: Any = torch.Tensor.data
_get_data = _data.__get__


class _WholeParameter(torch.autograd.Function):
    """The whole values of a sharded parameter. torch would give each rank the gradient of its own samples."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        ctx.parameter = parameter
        return whole(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mean = gradients[0].contiguous() / dist.get_world_size()
        dist.all_reduce(mean)
        part = own_part(mean, ctx.parameter).to(ctx.parameter.device)  # an offloaded one is in host memory
        return sharded_like(part, ctx.parameter)


_noted_parameters: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The parameters of which there have been aliases, by their memory."""


def note_alias(tensor: DTensor) -> None:
    """Note that the tensor has the memory of a parameter from now on, if so."""
    parameter = _noted_parameters.get(memory := memory_of(tensor))
    if parameter is not None and memory_of(parameter) == memory:
        parameter._noted(tensor)


def _new(name: str) -> Any:
    """The method of this name: a plain tensor, unless it has the parameter's shape. A model takes its dtype and device
    from any of its parameters, for what is mixed with activations: `weight.new_zeros(layers, batch, hidden)`."""

    @wraps(getattr(torch.Tensor, name))
    def new(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = getattr(DTensor, name)(self, *args, **kwargs)
        return made if made.shape == self.shape else local_part(made).requires_grad_(made.requires_grad)

    return new


class ShardedParameter(DTensor):
    """A sharded parameter for which `p.data = values` sets its values.

    torch would accept the assignment, but continue with the old values, which are in the DTensor's local tensor. It is
    created by setting `__class__` of a DTensor; results of operations are ordinary DTensors.

    FSDP keeps the memory of a parameter, so an assignment writes into it. In torch the old memory stays as it was, for
    what `p.data` and `p.detach()` gave before: `backup = p.data; p.data = average; ...; p.data = backup`, or a swap
    with another model. Such aliases therefore get a copy of the old values before it is written.
    """

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        return self._noted(_get_data(self))

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if tuple(values.shape) != tuple(self.shape):
            raise UsageError(
                f"parameter.data = ...: a sharded parameter keeps its shape (got {tuple(values.shape)}, it has "
                f"{tuple(self.shape)}); change shapes before prepare."
            )
        with torch.no_grad():
            self._leave_to_aliases()
            if not isinstance(values, DTensor):
                local_part(self).copy_(own_part(values, self))
            elif values.placements == self.placements and values.device_mesh == self.device_mesh:
                local_part(self).copy_(local_part(values))
            else:
                from shardkit.sharding.tensors.settled import redistributed

                local_part(self).copy_(local_part(redistributed(values, self.placements)))

    def detach(self) -> Any:
        if not torch.is_inference_mode_enabled():  # in which torch cannot detach a DTensor
            return self._noted(super().detach())
        with outside_inference_mode():
            return self._noted(super().detach())

    def _noted(self, alias: Any) -> Any:
        """Note something that shares the memory, as long as it exists."""
        alive = [reference for reference in vars(self).get("shardkit_aliases", ()) if reference() is not None]
        vars(self)["shardkit_aliases"] = [*alive, ref(alias)]
        _noted_parameters[memory_of(self)] = self
        return alias

    def _leave_to_aliases(self) -> None:
        """Give the aliases a copy of the present values, in memory of their own."""
        found = [reference() for reference in vars(self).pop("shardkit_aliases", ())]
        memory, copied = memory_of(self), None
        for alias in found:
            if alias is not None and memory_of(alias) == memory:
                copied = local_part(self).clone() if copied is None else copied
                alias._local_tensor = copied

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The whole values, with torch's `grad_placements`; without it their gradient is the mean over all ranks, as
        that of a parameter in forward, and backward is collective."""
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            return _WholeParameter.apply(self)
        return whole(self) if grad_placements is None else super().full_tensor(grad_placements=grad_placements)

    new_empty, new_full = _new("new_empty"), _new("new_full")
    new_ones, new_zeros = _new("new_ones"), _new("new_zeros")

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

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        """As DTensor's, of this class: a function compiled by torch.compile expects what it was traced with."""
        made: Any = DTensor.__tensor_unflatten__(inner_tensors, spec, outer_size, outer_stride)
        made.__class__ = ShardedParameter
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]
