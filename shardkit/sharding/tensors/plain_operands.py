"""Plain tensors beside sharded ones: `target.lerp_(p, 0.01)`, `(p - start).square().sum()`, `torch.where(mask, p, 0)`.

A copy of the model from before `prepare`, weights to stay close to, a mask: torch refuses to mix these with sharded
tensors. Here a plain tensor counts as equal on all ranks, which is so in a loop that one process runs:

    p - start, torch.maximum(p, start)     sharded; each rank computes its part, without communication
    average.add_(p), average.copy_(p)      whole on every rank: see `into_plain`
    (p - start).norm().backward()          `start.grad`, if it needs one, is whole on every rank: see `mixed_losses`
    loss + p.norm()                        in an evaluation this rank's, as `loss` is; with a graph the mean over ranks
    (losses * weights).backward()          refused if ranks have different `losses`: each would weigh its own samples
    batch * weights                        also without a gradient, where the plain tensor has more rows

Products of matrices are not among them: their plain operands are activations, of this rank's samples. See `products`.

Checked on torch 2.11 to 2.15.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from shardkit.distributed import named_barrier
from shardkit.distributed.tensors import is_dtensor, local_part, own_part, sharded_like
from shardkit.errors import UsageError
from shardkit.sharding.hooks import is_in_backward
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.settled import is_pending, of_whole, on_one_device, one_by_one, settle

_BY_ELEMENT = operators(
    "add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor_mode pow.Tensor_Tensor remainder.Tensor fmod.Tensor "
    "floor_divide atan2 hypot xlogy.Tensor logaddexp copysign.Tensor lerp.Scalar lerp.Tensor addcmul addcdiv maximum "
    "minimum fmax fmin clamp.Tensor where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar "
    "masked_fill.Tensor isclose eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or "
    "logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor"
)
_OF_WHOLE = operators("dot dist equal")
_LISTS = operators(
    "_foreach_add.List _foreach_add_.List _foreach_sub.List _foreach_sub_.List _foreach_mul.List _foreach_mul_.List "
    "_foreach_div.List _foreach_div_.List _foreach_maximum.List _foreach_maximum_.List _foreach_minimum.List "
    "_foreach_minimum_.List _foreach_lerp.List _foreach_lerp.Scalar _foreach_lerp_.List _foreach_lerp_.Scalar "
    "_foreach_addcmul.Scalar _foreach_addcmul_.Scalar _foreach_addcdiv.Scalar _foreach_addcdiv_.Scalar"
)


@cache
def install() -> None:
    """Makes them one process's. Has an effect once per process."""
    handle(_BY_ELEMENT, _by_element)
    handle(_OF_WHOLE, _on_whole_tensors)
    handle(_LISTS, _each)


def with_own_parts(args: tuple[Any, ...], like: Any = None) -> tuple[Any, ...]:
    """The arguments with this rank's parts of plain tensors that have the shape of `like` (the first argument), a
    sharded tensor, or broadcast to it."""
    like = args[0] if like is None else like
    if not is_dtensor(like) or is_pending(like):
        return args

    def own(value: Any) -> Any:
        if not _is_plain(value) or not _broadcasts(value, like):
            return value
        part = own_part(value.detach().expand(like.shape), like)
        return sharded_like(part.to(local_part(like).device), like)

    return tuple(map(own, args))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_dtensor(value) and value.dim() > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_dtensor(value) and value.dim() == 0


def _has_gradient(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in args if isinstance(one, torch.Tensor))


def _broadcasts(value: torch.Tensor, like: Any) -> bool:
    sizes = zip(reversed(value.shape), reversed(like.shape), strict=False)
    return value.dim() <= like.dim() and all(size in (1, whole_size) for size, whole_size in sizes)


def _by_element(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where a value is pending, and in the first backwards."""
    return as_torch_does(operator, sharded_operands(operator, args), kwargs)


def sharded_operands(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator by elements, all of them sharded. UsageError on all ranks where the operator's
    result has a gradient, and a plain argument differs between ranks."""
    pending = {one.placements for one in args if is_dtensor(one) and is_pending(one)}
    if len(pending) > 1:  # a sum and a mean, which torch 2.11 cannot add
        args = tuple(map(settle, args))
    if not any(map(_is_plain, args)):
        # torch would take this rank's number, such as the loss of its samples, for a part of the pending sum
        meets_number = pending and any(map(_is_number, args))
        return tuple(map(settle, args)) if meets_number and not (_has_gradient(args) or is_in_backward()) else args
    args, has_gradient = tuple(map(settle, args)), _has_gradient(args)
    like: Any = max(filter(is_dtensor, args), key=lambda tensor: tensor.dim())
    for value in filter(_is_plain, args):
        is_wider = not _broadcasts(value, like)
        if has_gradient or is_wider:
            sizes = "x".join(map(str, value.shape))
            _refuse_different(f"{operator.name()}({sizes})", value, like, always=is_wider)
        if is_wider:
            like = like.expand(torch.broadcast_shapes(value.shape, like.shape))
    return with_own_parts(args, like)


def refuse_different_indices(operator: Any, args: tuple[Any, ...]) -> None:
    """UsageError on all ranks where a sharded tensor that needs a gradient is read at other places by each rank, such
    as those of its samples. Collective, the first times."""
    tensor, *indices = args
    if is_dtensor(tensor) and tensor.requires_grad and torch.is_grad_enabled():
        for value in filter(_is_plain, tree_leaves(indices)):
            _refuse_different(f"{operator.name()}(indices)", value, tensor, always=False)


def _refuse_different(call: str, value: torch.Tensor, like: Any, always: bool) -> None:
    """UsageError on all ranks where it differs between them. Collective, the first times or always."""
    if value.is_meta or not (named_barrier.meet_at_first(call, UsageError) or always):
        return
    values = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    numbers = values.float()  # some devices have no fp64
    own = torch.stack([numbers.sum(), numbers.abs().sum()]).to(like.device_mesh.device_type)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    if any(not torch.allclose(one, own, rtol=1e-5, equal_nan=True) for one in found):
        raise UsageError(
            "sharded tensor: a plain tensor counts as equal on all ranks, and this one differs between them (got a "
            f"tensor of shape {tuple(value.shape)} in {call.partition('(')[0]}); compute it in the forward of a module "
            "of the model that has the parameter, or give all ranks one value: accelerator.reduce(tensor, 'mean')."
        )


def _on_whole_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective. The result of every rank is that of one process."""
    if not any(map(_is_plain, args)):
        return as_torch_does(operator, args, kwargs)
    return of_whole(operator, on_one_device(args), kwargs)


def _each(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator on lists, some of whose tensors are plain: tensor by tensor."""
    tensors = [one for value in args if isinstance(value, (list, tuple)) for one in value]
    if not any(map(_is_plain, tensors)):
        return as_torch_does(operator, args, kwargs)
    name = operator._schema.name.removeprefix("aten::_foreach_")
    return one_by_one(name, args, kwargs, lambda function, args, kwargs: function(*args, **kwargs))
