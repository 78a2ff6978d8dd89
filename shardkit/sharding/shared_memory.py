"""Parameters that lie in the same memory as another tensor of the model without being the same parameter.

In one process an update of one changes the other. Shards are copies, so under FSDP it would not.
"""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardkit.distributed.tensors import is_dtensor


def pairs_in_same_memory(model: nn.Module) -> list[tuple[str, str]]:
    """The names of a trained parameter and another parameter or buffer that overlap in memory."""
    by_storage: dict[tuple[torch.device, int], list[tuple[int, int, bool, str, torch.Tensor]]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not _has_own_memory(tensor):
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin, is_dense = tensor.data_ptr(), extent == tensor.numel()
        end, storage = begin + extent * tensor.element_size(), tensor.untyped_storage().data_ptr()
        by_storage.setdefault((tensor.device, storage), []).append((begin, end, is_dense, name, tensor))
    found = []
    for members in by_storage.values():
        members.sort(key=lambda member: member[0])
        for number, (begin, end, is_dense, name, tensor) in enumerate(members):
            for other_begin, _, other_is_dense, other_name, other in members[number + 1 :]:
                if other_begin >= end:
                    break
                is_trained = tensor.requires_grad or other.requires_grad
                # Strided parts of one tensor, such as its columns, may alternate in memory without an overlap.
                if is_trained and (begin == other_begin or (is_dense and other_is_dense)):
                    found.append((name, other_name))
    return found


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether it has elements at an address: not on the meta device or XLA's, fake, or of a class that holds them
    elsewhere."""
    if is_lazy(tensor) or is_dtensor(tensor) or hasattr(type(tensor), "__tensor_flatten__"):
        return False
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().device.type not in ("meta", "xla")  # meta is also that of a fake tensor
