"""`tensor.data = values` of sharded tensors that are no parameters: gradients, averages, an optimizer's state.

torch accepts the assignment, but a DTensor continues with its old values, which are in its local tensor.
(`sharded_parameter.py` has that of parameters, whose memory FSDP keeps.)
"""

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import own_part, sharded_like
from shardkit.sharding.sharded_parameter import note_alias

_data: Any = torch.Tensor.data


@cache
def install() -> None:
    """Makes the assignment set the values. Has an effect once per process."""
    DTensor.data = property(_data.__get__, _set_data)  # type: ignore[assignment]


def _set_data(tensor: DTensor, values: torch.Tensor) -> None:
    """As torch's: from now on the tensor has the memory of the values. Of plain ones, equal on all ranks, its part."""
    if not isinstance(values, DTensor):
        values = sharded_like(own_part(values.to(tensor.device), tensor), tensor)
    with torch.no_grad():
        _data.__set__(tensor, values)  # shape and dtype
    tensor._local_tensor, tensor._spec = values._local_tensor, values._spec
    note_alias(tensor)
