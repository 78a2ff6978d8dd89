"""How a unit's tensors travel: in a dtype that every backend takes.

Neither NCCL nor gloo has int16, uint16 to uint64 and some dtypes of 8 bits, and NCCL has no complex numbers: torch
gathers them as real ones, but its reduce-scatter hands them on (seen in torch 2.11 to 2.15).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from shardkit.distributed.tensors import flat_bytes, travels


def take_all_dtypes(group: Any) -> None:
    """Lets a unit's parameter group (torch's FSDPParamGroup) gather and reduce parameters of any dtype."""
    dtypes = {parameter.sharded_param.dtype for parameter in group.fsdp_params}
    if not all(map(travels, dtypes)):
        group._all_gather_comm = _AsBytes()
    if any(dtype.is_complex for dtype in dtypes):
        group._reduce_scatter_comm = _AsReal()


class _AsBytes(DefaultAllGather):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(flat_bytes(output_tensor), flat_bytes(input_tensor), *args, **kwargs)


class _AsReal(DefaultReduceScatter):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(_real(output_tensor), _real(input_tensor), *args, **kwargs)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
