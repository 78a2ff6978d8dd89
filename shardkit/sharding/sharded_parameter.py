"""The parameter that fully_shard puts in the place of a whole one, for loops that assign to `p.data`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, local_slices
from shardkit.errors import UsageError

_data: Any = torch.Tensor.data
_get_data = _data.__get__


class ShardedParameter(DTensor):
    """A sharded parameter whose `p.data = values` sets its values.

    torch would accept that and go on with the old ones: a DTensor's values are those of its local tensor. Made of a
    DTensor by `__class__`; what is computed from it is an ordinary DTensor.
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
                local_part(self).copy_(values[local_slices(self)].reshape(local_part(self).shape))
            elif values.placements == self.placements and values.device_mesh == self.device_mesh:
                local_part(self).copy_(local_part(values))
            else:
                self.copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]
