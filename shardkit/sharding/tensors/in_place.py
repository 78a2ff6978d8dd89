"""In-place arithmetic of sharded tensors that torch refuses or gets wrong; here it is that of whole tensors.

    total += p.grad.norm()           into a plain tensor
    torch.add(old, p, out=old)       the same, and `out` of sharded tensors with plain ones
    bias.grad.add_(whole)            one element along the sharded dim: torch takes such a dim for one to broadcast
    p.add_(other)                    meshes over the same ranks: a reference model that a library has sharded itself
    norm.clamp_(min=eps)             the value is pending
    nn.init.eye_(p)                  torch would write the identity into each rank's part, of another size then
    empty_like(p.T @ p)              torch takes it for pending: what each rank writes would be added up

Checked on torch 2.11 to 2.15.
"""

from functools import cache
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardkit.distributed.tensors import from_part, is_dtensor, local_part, own_part
from shardkit.errors import UsageError
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.into_plain import into_plain
from shardkit.sharding.tensors.plain_operands import with_own_parts
from shardkit.sharding.tensors.settled import is_pending, is_single, redistributed, settle_in_place, settled_placements

_WITH_TENSORS = operators(
    "lerp_.Scalar lerp_.Tensor addcmul_ addcdiv_ clamp_.Tensor clamp_min_.Tensor clamp_max_.Tensor pow_.Tensor "
    "remainder_.Tensor fmod_.Tensor div_.Tensor_mode copysign_.Tensor atan2_ hypot_ logical_and_ logical_or_ "
    "logical_xor_ bitwise_and_.Tensor bitwise_or_.Tensor bitwise_xor_.Tensor"
)
_WITH_OUT = operators(
    "add.out sub.out mul.out div.out pow.Tensor_Tensor_out lerp.Scalar_out lerp.Tensor_out addcmul.out addcdiv.out "
    "where.self_out maximum.out minimum.out fmax.out fmin.out clamp.Tensor_out logical_and.out logical_or.out "
    "logical_xor.out"
)
_OF_NUMBERS = operators("clamp_ clamp_min_ clamp_max_ pow_.Scalar sqrt_ rsqrt_ reciprocal_ abs_ neg_ exp_ log_")


@cache
def install() -> None:
    """Makes it that of whole tensors. Has an effect once per process."""
    handle(operators("add_.Tensor sub_.Tensor mul_.Tensor"), _change)
    handle((*_WITH_TENSORS, *_OF_NUMBERS), _settle)
    handle(_WITH_OUT, _into)
    handle(operators("eye.out eye.m_out"), _identity)
    handle(operators("empty_like new_empty new_empty_strided"), _empty)
    handle(operators("t_ transpose_"), _refuse_transposition)


def _change(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where a value is pending, or is whole on all ranks but in the tensor."""
    if not is_dtensor(args[0]):
        return into_plain(operator, args, kwargs)
    tensor, value = args = with_own_parts(args)
    if is_dtensor(value) and _are_over_the_same_ranks(tensor.device_mesh, value.device_mesh):
        value = from_part(local_part(value), value, tensor.device_mesh, value.placements)
        args = (tensor, value)
    if is_dtensor(value) and value.shape == tensor.shape and is_single(tensor):
        operator(local_part(tensor), local_part(redistributed(value, tensor.placements)), **kwargs)
        return tensor
    return _settle(operator, args, kwargs)


def _settle(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where the tensor is plain; where its value is pending, and the operator does not keep it so."""
    tensor = args[0]
    if not is_dtensor(tensor):
        return into_plain(operator, args, kwargs)
    if not is_pending(tensor):
        return as_torch_does(operator, with_own_parts(args), kwargs)
    before = local_part(tensor).clone()
    try:
        return as_torch_does(operator, args, kwargs)
    except RuntimeError:  # torch 2.11 has computed by then
        local_part(tensor).copy_(before)
    settle_in_place(tensor)
    return as_torch_does(operator, args, kwargs)


def _into(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where `out` is plain."""
    out = kwargs["out"]
    if not is_dtensor(out):
        return into_plain(operator, args, kwargs)
    return as_torch_does(operator, with_own_parts(args, out), kwargs)


def _identity(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Not collective."""
    target = kwargs["out"]
    mine = local_part(target)
    mine.copy_(own_part(torch.eye(*args, dtype=mine.dtype, device=mine.device), target))
    return target


def _empty(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Not collective. Of a tensor whose value is pending, one whose value is not: each rank writes whole values."""
    found = as_torch_does(operator, args, kwargs)
    if not is_dtensor(found) or not is_pending(found):
        return found
    return from_part(local_part(found), found, found.device_mesh, settled_placements(found))


def _refuse_transposition(*_: Any) -> NoReturn:
    raise UsageError(
        "sharded tensor: it cannot be transposed in place (got t_(), maybe of nn.init.orthogonal_); initialize the "
        "model before prepare, or set whole values, equal on all ranks: weight.data = values."
    )


def _are_over_the_same_ranks(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes that torch takes for different ones differ in the names of their axes only."""
    return mesh != other and mesh.device_type == other.device_type and torch.equal(mesh.mesh, other.mesh)
