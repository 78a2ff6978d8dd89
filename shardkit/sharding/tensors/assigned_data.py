"""`tensor.data = values` of sharded tensors that are no parameters: gradients, averages, an optimizer's state; and of
plain tensors, with sharded values: `average.data = p.data.clone()`.

torch accepts both. But a DTensor continues with its old values, which are in its local tensor; and a plain tensor gets
the memory of a DTensor, which has none, so that its next use ends the process.
(`sharded_parameter.py` has that of parameters, whose memory FSDP keeps.)
"""

from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import own_part, sharded_like
from shardkit.sharding.tensors.into_plain import gathered
from shardkit.sharding.tensors.sharded_parameter import note_alias

_data: Any = torch.Tensor.data


@cache
def install() -> None:
    """Makes the assignment set the values. Has an effect once per process."""
    DTensor.data = property(_data.__get__, _set_data)  # type: ignore[assignment]
    torch.Tensor.data = _PlainData(_data.__get__, _set_data_of_plain)  # type: ignore[assignment]


def _set_data(tensor: DTensor, values: torch.Tensor) -> None:
    """As torch's: from now on the tensor has the memory of the values. Of plain ones, equal on all ranks, its part."""
    if not isinstance(values, DTensor):
        values = sharded_like(own_part(values.to(tensor.device), tensor), tensor)
    with torch.no_grad():
        _data.__set__(tensor, values)  # shape and dtype
    tensor._local_tensor, tensor._spec = values._local_tensor, values._spec
    note_alias(tensor)


class _PlainData(property):
    """`torch.Tensor.data`, which a `__torch_function__` may ask for its name, as it can torch's own."""

    __name__ = "data"


def _set_data_of_plain(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """As torch's. Collective where the values are sharded: the tensor gets all of them."""
    if isinstance(values, DTensor):  # one that is offloaded stays in host memory
        values = gathered(values, "plain.data=sharded").to(values.device)
    _data.__set__(tensor, values)
