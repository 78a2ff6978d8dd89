"""Reductions of sharded tensors in which torch differs from those of whole tensors, as in penalties and statistics.

    mse_loss(p, before)              torch takes the mean of the parts' means, also where parts differ in size
    sum, mean                        of norms that are pending; over the dims [], which torch itself takes in gradients
    a / p.sum()                      a divisor that is pending (torch 2.11 alone is wrong)
    (p > 9).any(), all(), allclose   in further arithmetic
    cumsum, argmax                   along a dim counted from the end, which torch does not take for the sharded one
    max, min, argmax, norm           where a rank has no part: that rank alone would raise
    qkv.weight.chunk(3)[0].norm()    its gradient joins parts with plain zeros
    stack([p.mean(), p.norm()])      values that are pending in different ways

Checked on torch 2.11, 2.13 and 2.15.
"""

import math
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Partial

from shardkit.distributed.tensors import is_dtensor
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.into_plain import into_plain
from shardkit.sharding.tensors.plain_operands import sharded_operands, with_own_parts
from shardkit.sharding.tensors.settled import as_replicated, has_empty_part, replicated, settle

_aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # the numbers of ATen's reductions
_LOSSES = operators(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits"
)
_GRADIENTS = operators(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward "
    "binary_cross_entropy_backward"
)
_SUMS = operators("sum sum.dim_IntList mean mean.dim")
_QUOTIENTS = (_aten.div.Tensor, _aten.div_.Tensor)
_ANSWERS = operators("any any.dim any.dims all all.dim all.dims")
_RUNNING = operators("cumsum cumprod logcumsumexp")
_PLACES = (_aten.argmax.default, _aten.argmin.default)
_NORM = _aten.linalg_vector_norm.default
_EXTREMES = (*operators("max min max.dim min.dim amax amin aminmax"), *_PLACES, _NORM)


@cache
def install() -> None:
    """Makes them those of whole tensors. Has an effect once per process."""
    handle(_LOSSES, _mean_loss)
    handle(_GRADIENTS, _gradient_of_mean)
    handle(_SUMS, _sum)
    handle(_QUOTIENTS, _quotient)
    handle((_aten.cat.default, _aten.stack.default), _join)
    handle(_ANSWERS, _answer)
    handle((_aten._is_all_true.default, _aten._is_any_true.default), _answer_by_name)
    handle([_aten.allclose.default], _are_close)
    handle(_RUNNING, _running)
    handle(_EXTREMES, _extreme)


def _mean_loss(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = _with_sharded_operands(operator, args, kwargs)
    if arguments["reduction"] != _MEAN:
        return as_torch_does(operator, (), arguments)
    return as_torch_does(operator, (), {**arguments, "reduction": _NONE}).mean()


def _gradient_of_mean(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = _with_sharded_operands(operator, args, kwargs)
    if arguments["reduction"] != _MEAN:
        return as_torch_does(operator, (), arguments)
    each = (arguments["grad_output"] / arguments["self"].numel()).expand(arguments["self"].shape)
    return as_torch_does(operator, (), {**arguments, "grad_output": each, "reduction": _NONE})


def _with_sharded_operands(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss or of its gradient by their names; also plain ones are sharded."""
    arguments = _by_name(operator, args, kwargs)
    return dict(zip(arguments, sharded_operands(operator, tuple(arguments.values())), strict=True))


def _sum(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *others = args
    if any(one.is_partial() and not _adds_up(one) for one in tensor.placements):
        tensor = settle(tensor)
    if others and others[0] == []:
        others[0] = list(range(tensor.dim()))
    return as_torch_does(operator, (tensor, *others), kwargs)


def _quotient(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operator is _aten.div_.Tensor:
        if not is_dtensor(args[0]):
            return into_plain(operator, args, kwargs)
        dividend, divisor = with_own_parts(args)
    else:
        dividend, divisor = sharded_operands(operator, args)
    return as_torch_does(operator, (dividend, settle(divisor)), kwargs)


def _join(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain tensors count as equal on all ranks: in gradients they are zeros, of parts of a split that nothing used.
    What is pending in different ways, such as a mean and a norm, is settled first."""
    tensors, *others = args
    mesh = next(one.device_mesh for one in tensors if is_dtensor(one))
    tensors = [one if is_dtensor(one) else as_replicated(one, mesh) for one in tensors]
    if any(one.placements != tensors[0].placements for one in tensors):
        tensors = [settle(one) for one in tensors]
    return as_torch_does(operator, (tensors, *others), kwargs)


def _answer(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return settle(as_torch_does(operator, args, kwargs))


def _answer_by_name(operator: Any, args: tuple[Any, ...], _: Any) -> Any:
    """As `torch.distributions` asks whether arguments are valid."""
    return args[0].all() if operator is _aten._is_all_true.default else args[0].any()


def _are_close(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _running(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, *others = args
    return as_torch_does(operator, (tensor, _from_the_front(dim, tensor), *others), kwargs)


def _from_the_front(dim: int, tensor: torch.Tensor) -> int:
    return dim + tensor.dim() if dim < 0 else dim


def _extreme(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *others = args
    if operator in _PLACES and others and others[0] is not None:
        others[0] = _from_the_front(others[0], tensor)
    has_value = operator is _NORM and not math.isinf(_by_name(operator, args, kwargs)["ord"])  # also without elements
    if not has_value and has_empty_part(tensor):
        tensor = replicated(tensor)
    return as_torch_does(operator, (tensor, *others), kwargs)


def _adds_up(placement: Any) -> bool:
    """Whether the pending value is the sum or mean of all ranks' (a norm is the root of a sum)."""
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


def _by_name(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by their names, with the operator's defaults."""
    names = [argument.name for argument in operator._schema.arguments]
    defaults = {one.name: one.default_value for one in operator._schema.arguments if one.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
