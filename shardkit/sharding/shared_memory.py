"""Parameters that lie in the same memory as another tensor of the model without being the same parameter.

In one process an update of one changes the other. Shards are copies, so under FSDP it would not.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardkit.distributed.tensors import is_dtensor


class _Extent(NamedTuple):
    """Where a tensor lies in memory: the addresses of its first byte, and after its last."""

    begin: int
    end: int
    is_dense: bool
    name: str
    is_trained: bool


def pairs_in_same_memory(model: nn.Module) -> list[tuple[str, str]]:
    """The names of a trained parameter and another parameter or buffer that overlap in memory."""
    by_storage: dict[tuple[torch.device, int], list[_Extent]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if _has_own_memory(tensor):
            key = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage.setdefault(key, []).append(_extent(name, tensor))
    return [
        (one.name, other.name)
        for members in by_storage.values()
        for one, other in _overlapping(sorted(members, key=lambda member: member.begin))
        # Strided parts of one tensor, such as its columns, may alternate in memory without an overlap.
        if (one.is_trained or other.is_trained) and (one.begin == other.begin or (one.is_dense and other.is_dense))
    ]


def _extent(name: str, tensor: torch.Tensor) -> _Extent:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    end = begin + elements * tensor.element_size()
    return _Extent(begin, end, elements == tensor.numel(), name, tensor.requires_grad)


def _overlapping(extents: Sequence[_Extent]) -> Iterator[tuple[_Extent, _Extent]]:
    """The pairs in which the second, in the order of `begin`, begins before the end of the first."""
    for number, one in enumerate(extents, 1):
        for other in extents[number:]:
            if other.begin >= one.end:
                break
            yield one, other


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether it has elements at an address: not on the meta device or XLA's, fake, or of a class that holds them
    elsewhere."""
    if is_lazy(tensor) or is_dtensor(tensor) or hasattr(type(tensor), "__tensor_flatten__"):
        return False
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().device.type not in ("meta", "xla")  # meta is also that of a fake tensor
