"""Activation offload: tensors that blocks save for backward are kept in host memory until backward needs them.

Copies run on the compute stream, so they need no synchronization, and do not overlap with compute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardkit.distributed.host_memory import copied_to_device, copied_to_host
from shardkit.sharding.activation import change_forward

# Smaller tensors stay on the device: the fixed cost of a copy is about that of so many bytes.
LEAST_BYTES = 4096


# Custom operators, so that the plan can distinguish host memory from device memory (`plan/memory_tracker.py`).
@torch.library.custom_op("shardkit::to_host", mutates_args=())
def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return copied_to_host(tensor)


@_to_host.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="cpu")


@torch.library.custom_op("shardkit::from_host", mutates_args=())
def _from_host(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    return copied_to_device(copy, device)


@_from_host.register_fake
def _(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(copy, device=device)


def offload_blocks(blocks: Iterable[nn.Module]) -> None:
    """Make the blocks keep tensors saved for backward in host memory, except parameters and buffers. In place.

    Only `forward` is replaced. Apply it after activation checkpointing: then it offloads the inputs of blocks.
    """
    copies = _Copies()
    for block in blocks:
        _offload(block, copies)


def _offload(block: nn.Module, copies: _Copies) -> None:
    def offloading(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: torch.Tensor) -> Any:
            stays = tensor.numel() * tensor.element_size() < LEAST_BYTES or _is_expanded(tensor)
            return tensor if stays or _is_state(tensor, block) else copies.of(tensor)

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, torch.Tensor) else kept()):
            return forward(*args, **kwargs)

    change_forward(block, "offload", offloading)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is expanded, so that its copy would need more memory than the tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _is_state(tensor: torch.Tensor, block: nn.Module) -> bool:
    """Whether a tensor is, or is a view of, one of the block's current (gathered) parameters or buffers."""
    storage = tensor.untyped_storage()._cdata
    groups = (group for module in block.modules() for group in (module._parameters, module._buffers))
    return any(state is not None and _storage_of(state) == storage for group in groups for state in group.values())


def _storage_of(state: torch.Tensor) -> int:
    return getattr(state, "_local_tensor", state).untyped_storage()._cdata


class _OnHost:
    """A tensor's copy in host memory. If several operators saved the same tensor, it is copied back once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._device = _to_host(tensor.detach()), tensor.device
        self._here: Callable[[], torch.Tensor | None] = lambda: None

    def back(self) -> torch.Tensor:
        tensor = self._here()
        if tensor is None:
            tensor = _from_host(self._copy, self._device)
            self._here = weakref.ref(tensor)
        return tensor


class _Copies:
    """The existing copies by their source, so that a tensor is copied once even if several operators save it."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[weakref.ref, weakref.ref]] = {}

    def of(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that returns the tensor on its device. Contiguous tensors are copied as flat memory, so that
        different views and permutations of it share one copy."""
        strides = tensor.stride()
        order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        as_it_lies = tensor.detach().permute(order)
        if not as_it_lies.is_contiguous():
            return self._of(tensor).back
        flat, shape = self._of(as_it_lies.view(-1)), as_it_lies.shape
        back_in_order = sorted(range(len(order)), key=order.__getitem__)
        return lambda: flat.back().view(shape).permute(back_in_order)

    def _of(self, tensor: torch.Tensor) -> _OnHost:
        storage = tensor.untyped_storage()
        place = storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
        key = *place, tensor.dtype, tensor._version
        source, found = self._known.get(key, (None, None))
        if source is not None and found is not None and source() is storage and (copy := found()) is not None:
            return copy
        made = _OnHost(tensor)
        self._known[key] = weakref.ref(storage), weakref.ref(made, lambda _: self._known.pop(key, None))
        return made
