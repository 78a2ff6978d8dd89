"""This rank's part of sharded tensors, and the whole of them; how tensors lie in memory and travel.

DTensor takes half a second to import, so this module does not import it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from shardkit.dims import part_of_dim
from shardkit.distributed import xla

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether the value is a DTensor, without importing torch's module."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, getattr(module, "DTensor", ()))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a sharded tensor, or the plain tensor; detached, sharing its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():  # else every call would build an autograd node
        return _plain(tensor.to_local())


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Code in which new tensors can be trained later, in a caller's `torch.inference_mode()` too."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_transformed() -> bool:
    """Whether this is called inside a transform of torch.func (vmap, jacrev, ...), whose tensors have no memory."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Code whose tensors are plain ones in a caller's transform of torch.func, too."""
    if not is_transformed():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of the values in memory."""
    data = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return ctypes.string_at(data.data_ptr(), data.nbytes)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as uint8, 1-dim, on their device; shares memory where they lie there in order."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Of one value, torch calls any stride contiguous, and a view as bytes fails: `logits[:, 0]` of one sample.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)


_TRAVEL = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_TRAVEL |= {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
# A dtype that travels, by the size of another one.
_INSTEAD = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}


def travels(dtype: torch.dtype) -> bool:
    """Whether torch sends tensors of this dtype by every backend. NCCL and gloo have no int16 and no unsigned integers
    of more than 8 bits, and each lacks some of the 8-bit floats."""
    return dtype in _TRAVEL


def memory_of(tensor: torch.Tensor) -> int:
    """A number that is the same for tensors (or their local parts) that share memory; also where a simulation has
    none."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.untyped_storage()._cdata


def _plain(local: torch.Tensor) -> torch.Tensor:
    """A part that FSDP gathers in fp8 is torchao's tensor around the values: those."""
    module = sys.modules.get("torchao.float8.fsdp_utils")
    kind = getattr(module, "WeightWithDynamicFloat8CastTensor", ())
    return local._tensor if isinstance(local, kind) else local


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether it is of a class that holds its values in other tensors, as torchao's quantized weights; it has no memory
    of its own."""
    return hasattr(type(local_part(tensor)), "__tensor_flatten__")


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the values of a composed one; of any other, itself."""
    if not is_composed(tensor):
        yield tensor
        return
    values: Any = tensor.detach()
    for name in values.__tensor_flatten__()[0]:
        yield from parts_of(getattr(values, name))


def whole(tensor: DTensor) -> torch.Tensor:
    """All ranks' parts of a sharded tensor together, on every rank, on the mesh's device. Collective."""
    is_in_host = gathers_in_host_memory(tensor.device_mesh)
    part = local_part(tensor).to("cpu") if is_in_host else part_on_mesh(tensor)
    dtype, is_only_moved = part.dtype, not any(placement.is_partial() for placement in tensor.placements)
    if travels(dtype) or is_composed(part) or not is_only_moved:
        found = sharded_like(part, tensor).full_tensor()
    else:
        found = sharded_like(part.view(_INSTEAD[dtype.itemsize]), tensor).full_tensor().view(dtype)
    return found.to(tensor.device_mesh.device_type) if is_in_host else found


def gathers_in_host_memory(mesh: DeviceMesh) -> bool:
    """Whether ranks with accelerators meet through gloo, as two that share one GPU: torch 2.11 ends the process where
    it gathers a DTensor on CUDA by gloo."""
    if mesh.device_type == "cpu":
        return False
    return any(dist.get_backend(group) == dist.Backend.GLOO for group in mesh.get_all_groups())


def part_on_mesh(tensor: DTensor) -> torch.Tensor:
    """The local part on the mesh's device, where its ranks communicate: an offloaded one is copied there."""
    part, kind = local_part(tensor), tensor.device_mesh.device_type
    return part if part.device.type == kind else part.to(kind)


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds, one slice a dim: `whole[local_slices(tensor)]`."""
    slices = [slice(0, size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dim = placement.dim  # type: ignore[attr-defined]
            mesh = tensor.device_mesh
            begin, length = part_of_dim(tensor.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            slices[dim] = slice(begin, begin + length)
    return tuple(slices)


def own_part(value: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor, in the shape of the local part of `tensor`. No communication; shares memory
    where it can."""
    return value[local_slices(tensor)].reshape(tensor._local_tensor.shape)


def sharded_like(part: torch.Tensor, like: Any) -> DTensor:
    """A DTensor with the mesh and placements of `like` from this rank's local part, as `from_part`."""
    return from_part(part, like, like.device_mesh, like.placements)


def from_part(part: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of the shape of `like` from this rank's local part. No communication; shares memory: an offloaded part
    stays in host memory."""
    from torch.distributed.tensor import DTensor

    if part.device.type in (mesh.device_type, "meta"):
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # from_local would copy it to the mesh's device. FSDP2 makes its offloaded parameters in this way, too.
    described = TensorMeta(like.shape, like.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), tensor_meta=described), requires_grad=False)


@torch.no_grad()
def put(target: torch.Tensor, read: Callable[[tuple[slice, ...] | None], torch.Tensor]) -> None:
    """Copy the result of `read(slices)` into `target`: this rank's part of a sharded tensor; slices None: the whole."""
    if xla.is_xla(target):
        xla.replace_(target, read(None).to(target.dtype))
    elif not is_dtensor(target):
        target.copy_(read(None))
    elif (local := local_part(target)).numel():
        local.copy_(read(local_slices(target)))
