"""Torch tensors and the layout: placements, bytes and pieces of tensors."""

import ctypes
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardkit.checkpoint.files.layout import Box, Chunk, Index, Mesh, TensorEntry, chunks_of, local_box
from shardkit.distributed import xla
from shardkit.distributed.tensors import flat_bytes, is_composed, local_part
from shardkit.errors import CheckpointError

DTYPES = {
    torch.float64: "F64", torch.int64: "I64", torch.uint64: "U64", torch.complex64: "C64",
    torch.float32: "F32", torch.int32: "I32", torch.uint32: "U32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.uint16: "U16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def entry_of(tensor: torch.Tensor, index: Index, holders: Mesh, where: str) -> TensorEntry:
    """The index entry of a tensor. A tensor that is not a DTensor is replicated on all ranks of `holders`."""
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{where}: safetensors does not support this dtype (got {tensor.dtype}); convert it first."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{where}: only dense tensors can be saved (got {tensor.layout}); convert it first.")
    if is_composed(tensor):
        kind = type(local_part(tensor)).__name__
        raise CheckpointError(
            f"{where}: a {kind} consists of several tensors, and cannot be saved; use plain tensors: quantize a model "
            "after it is loaded, or save only its adapters by save_model; train with an optimizer whose state is plain."
        )
    shape, dtype = tuple(tensor.shape), DTYPES[tensor.dtype]
    if not isinstance(tensor, DTensor):
        return TensorEntry(shape, dtype, index.mesh_number(holders), (None,) * len(holders.shape))
    return TensorEntry(shape, dtype, index.mesh_number(mesh_of(tensor.device_mesh)), _placements(tensor, where))


@lru_cache(maxsize=16)  # DeviceMesh computes its ranks in each call, which takes half of the time to plan a tensor
def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The mesh of a DTensor, for the index."""
    ranks = tuple(mesh.mesh.flatten().tolist())
    return Mesh(tuple(mesh.mesh.shape), None if ranks == tuple(range(len(ranks))) else ranks, mesh.mesh_dim_names or ())


def _placements(tensor: DTensor, where: str) -> tuple[int | None, ...]:
    found: list[int | None] = []
    for placement in tensor.placements:
        if placement.is_replicate():
            found.append(None)
        elif type(placement) is Shard:
            found.append(placement.dim % tensor.ndim)
        else:
            raise CheckpointError(f"{where}: placement {placement} cannot be saved; redistribute it to Shard first.")
    return tuple(found)


def held_box(tensor: torch.Tensor) -> Box:
    """The part of a live tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    entry = TensorEntry(tuple(tensor.shape), "U8", 0, _placements(tensor, "a live tensor"))
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * tensor.ndim, (0,) * tensor.ndim)
    return local_box(entry, mesh_of(tensor.device_mesh), coordinate)


def pieces_to_write(index: Index, section: str, tensors: dict[str, torch.Tensor], rank: int) -> list[Any]:
    """(chunk, view of this rank's memory) of each piece of a section that this rank writes, in file order."""
    pieces = []
    for chunk in chunks_of(index, section, rank):
        entry = index.sections[section][chunk.name]
        mesh = index.meshes[entry.mesh]
        held = local_box(entry, mesh, mesh.coordinate(rank) or ())
        values = local_part(tensors[chunk.name])
        if isinstance(values, torch.Tensor):  # not one that `convert` reads from a file when it is written
            values = values.resolve_conj().resolve_neg()  # a conjugate view has other bytes
        pieces.append((chunk, narrow(values, chunk.box.inside(held))))
    return pieces


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of a box of a tensor."""
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:  # else itself: on XLA devices a view of it is computed
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared and writable; they keep it alive."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def empty(dtype: str, sizes: Iterable[int], is_touched: bool = False) -> torch.Tensor:
    """An uninitialized tensor in host memory. `is_touched`: several threads have touched its pages, for a copy from a
    device, which takes ten times longer where it is the first to touch them."""
    made = torch.empty(tuple(sizes), dtype=TORCH_DTYPES[dtype], device="cpu")
    return made.zero_() if is_touched else made


class HostMemory:
    """Memory for the values of one tensor at a time. It is reused, so that its pages are touched once."""

    def __init__(self) -> None:
        self._bytes = empty("U8", (0,))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values in contiguous host memory, until the next call; no copy if the tensor is that already."""
        tensor = tensor.detach()
        if not isinstance(tensor, torch.Tensor) or tensor.is_cpu:  # `convert` has tensors that are still in a file
            return tensor.to("cpu").contiguous()
        if xla.is_xla(tensor):
            return xla.to_host(tensor)
        return self.room(tensor.dtype, tensor.shape).copy_(tensor)

    def room(self, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """The memory as a tensor of this shape."""
        size = math.prod(sizes) * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = empty("U8", (size,), is_touched=True)
        return self._bytes[:size].view(dtype).view(tuple(sizes))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in new host memory, with the same strides."""
    tensor = tensor.detach()
    if xla.is_xla(tensor):
        return xla.to_host(tensor)
    if tensor.is_cpu or is_composed(tensor):
        return tensor.cpu().clone()
    return torch.empty_like(tensor, device="cpu").zero_().copy_(tensor)  # see `empty` for the zeros


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether values can be written into it."""
    local = local_part(tensor)
    return local.layout is torch.strided and not local.is_meta


def bytes_of(wanted: Sequence[tuple[torch.Tensor, int | None]]) -> list[torch.Tensor]:
    """The bytes of each tensor, in host memory; if it has more bytes than its limit, the first and the last of them.

    Tensors on a device are copied in one transfer.
    """
    found = [_flat_bytes(tensor, limit) for tensor, limit in wanted]
    for device in {flat.device for flat in found if not flat.is_cpu}:
        there = [number for number, flat in enumerate(found) if flat.device == device]
        moved = torch.cat([found[number] for number in there]).to("cpu")
        for number, flat in zip(there, moved.split([found[number].numel() for number in there]), strict=True):
            found[number] = flat
    return found


def _flat_bytes(tensor: torch.Tensor, limit: int | None) -> torch.Tensor:
    flat = flat_bytes(tensor)
    if limit is not None and flat.numel() > limit:
        return torch.cat([flat[: limit // 2], flat[-(limit // 2) :]])
    return flat


def bytes_to_write(pieces: dict[str, list[tuple[Chunk, torch.Tensor]]]) -> int:
    """Total size of all pieces."""
    return sum(chunk.bytes for section in pieces.values() for chunk, _ in section)
