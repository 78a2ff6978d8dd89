"""Operations on sharded tensors as optimizers of other libraries use them, where DTensor has gaps.

    with Settled():
        optimizer.step()

They take norms and change them in place, call foreach operators that DTensor lacks, keep plain tensors in their state,
flatten. Inside the context each of these gives what it gives on whole tensors: values that are pending (Partial) are
reduced at once, foreach operators run tensor by tensor, plain tensors count as equal on all ranks, and an operator that
DTensor lacks runs on the whole tensors. Updates that the optimizer compiles itself run without the compiler, which
would take the operations to DTensor's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Placement, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from shardkit.dims import part_of_dim
from shardkit.distributed.tensors import from_part, is_dtensor, local_part, own_part, part_on_mesh, sharded_like
from shardkit.sharding.tensors.copied_parts import CopiedPart, as_copy

_ASSIGNING = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"}
_RESHAPES = {"view", "reshape", "flatten", "ravel", "view_as", "reshape_as"}
# foreach operators that have no method of the same name
_METHODS = {"maximum": "clamp_min", "minimum": "clamp_max", "maximum_": "clamp_min_", "minimum_": "clamp_max_"}
# What DTensor says, before anything is computed, of an operator that it lacks: torch 2.11 lacks most of linalg.
_LACKING = ("does not have a sharding strategy registered", "Sharding propagation failed")


class Settled(TorchFunctionMode):
    """Inside, no result of an operation on sharded tensors is pending."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on = True

    def __enter__(self) -> Any:
        self._replication = implicit_replication()
        self._replication.__enter__()
        self._compile_nothing = torch.compiler.set_stance("force_eager")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._compile_nothing.__exit__(*error)
        self._replication.__exit__(*error)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, operations are torch's own: for the closure, which runs the model."""
        found, self._is_on = self._is_on, False
        self._compile_nothing.__exit__(None, None, None)
        try:
            yield
        finally:
            self._compile_nothing.__enter__()
            self._is_on = found

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_on or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return _operate(function, args, kwargs)


def _operate(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function gives on whole tensors, where DTensor gives something else, or nothing."""
    if is_dtensor(kwargs.get("out")):
        others = {key: value for key, value in kwargs.items() if key != "out"}
        return _operate(torch.Tensor.copy_, (kwargs["out"], _operate(function, args, others)), {})
    name: str = getattr(function, "__name__", "")
    if name.startswith("_foreach_") and _has_sharded_list(args):
        return one_by_one(name.removeprefix("_foreach_"), args, kwargs, _operate)
    first: Any = args[0] if args else None
    if _is_in_place(name) and isinstance(first, torch.Tensor):
        return _operate_in_place(function, args, kwargs)
    if name in _RESHAPES and is_dtensor(first) and (isinstance(first, CopiedPart) or is_uneven(first)):
        return as_copy(_settle_results(function(replicated(first), *args[1:], **kwargs)))
    return _tried(function, args, kwargs, partial(of_whole, function, args, kwargs))


def _operate_in_place(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *others = args
    if not is_dtensor(tensor):
        return function(tensor, *map(as_plain, others), **{key: as_plain(value) for key, value in kwargs.items()})
    on_whole = partial(in_place_of_whole, function, tensor, others, kwargs)
    return on_whole() if is_single(tensor) else _tried(function, args, kwargs, on_whole)


def _tried(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], on_whole: Callable[[], Any]) -> Any:
    """What DTensor gives; where it lacks the operator, what the other function does."""
    try:
        return _settle_results(function(*args, **kwargs))
    except (NotImplementedError, RuntimeError) as error:
        if not any(words in str(error) for words in _LACKING):
            raise
    return on_whole()


def _has_sharded_list(args: Sequence[Any]) -> bool:
    """Whether a list of a foreach operator's has a sharded tensor."""
    return any(is_dtensor(tensor) for value in args if isinstance(value, (list, tuple)) for tensor in value)


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.startswith("__")) or name in _ASSIGNING


def settle(value: Any) -> Any:
    """The value, not pending, and without its graph if it was: for operators, which are below autograd. Collective
    where it was."""
    if not is_dtensor(value) or not is_pending(value):
        return value
    detached: Any = value.detach()
    return redistributed(detached, settled_placements(value))


def settle_in_place(tensor: DTensor) -> None:
    """Makes the tensor one whose value is not pending. Collective where it was."""
    known = settle(tensor)
    tensor._local_tensor, tensor._spec = known._local_tensor, known._spec


def settled_placements(tensor: DTensor) -> list[Placement]:
    """Its placements once its value is not pending."""
    return [Replicate() if placement.is_partial() else placement for placement in tensor.placements]


def _settle_results(result: Any) -> Any:
    """The result of a function, of which no value is pending but those that have a graph. Collective where one was."""
    if type(result) in (list, tuple):
        return type(result)(map(_settle_results, result))
    return result if is_dtensor(result) and result.requires_grad else settle(result)


def is_pending(tensor: DTensor) -> bool:
    """Whether its value is the sum, or another reduction, of what ranks have."""
    return any(placement.is_partial() for placement in tensor.placements)


def replicated(tensor: DTensor) -> DTensor:
    return redistributed(tensor, [Replicate()] * tensor.device_mesh.ndim)


def redistributed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """The tensor with these placements, where it was: an offloaded one is copied to the mesh's device in between."""
    found = sharded_like(part_on_mesh(tensor), tensor).redistribute(placements=placements)
    return sharded_like(local_part(found).to(tensor.device), found)


def as_plain(value: Any) -> Any:
    """The whole of a sharded tensor, as a plain one; other values as they are. Collective for a sharded tensor."""
    return local_part(replicated(value)) if is_dtensor(value) else value


def is_uneven(tensor: DTensor) -> bool:
    """Whether ranks have parts of different sizes, which DTensor cannot flatten."""
    return any(size % ranks for size, ranks in _sharded_dims(tensor))


def has_empty_part(tensor: DTensor) -> bool:
    """Whether a rank has no element of it."""
    return any(part_of_dim(size, ranks, ranks - 1)[1] == 0 for size, ranks in _sharded_dims(tensor))


def is_single(tensor: DTensor) -> bool:
    """Whether the sharded dim has one element: DTensor takes it for one that is broadcast, and refuses to change it."""
    return any(size == 1 for size, _ in _sharded_dims(tensor))


def _sharded_dims(tensor: DTensor) -> list[tuple[int, int]]:
    """The size of each sharded dim, and among how many ranks it is split."""
    return [
        (tensor.shape[placement.dim], tensor.device_mesh.size(axis))  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard()
    ]


def on_one_device(args: Any) -> Any:
    """The arguments of an operator, with plain tensors where its sharded one is: a mask that was computed on the device
    for gradients in host memory."""
    device = local_part(next(filter(is_dtensor, tree_leaves(args)))).device

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) and not is_dtensor(value) else value

    return tree_map(moved, args)


def in_place_of_whole(function: Any, tensor: DTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
    """The in-place operation on the whole tensor; this rank keeps its part."""
    whole = as_plain(tensor)
    function(whole, *tree_map(as_plain, tuple(args)), **tree_map(as_plain, kwargs))
    local_part(tensor).copy_(own_part(whole, tensor))
    return tensor


def of_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on whole tensors, which every rank repeats: the result is replicated. Of those that the operator
    writes to, by its schema (bitsandbytes' kernels), this rank keeps its part."""
    mesh = next(value.device_mesh for value in tree_leaves((args, kwargs)) if is_dtensor(value))
    whole_args, whole_kwargs = tree_map(as_plain, args), tree_map(as_plain, kwargs)
    result = function(*whole_args, **whole_kwargs)
    wholes = _written(function, whole_args, whole_kwargs)
    for tensor, whole in zip(_written(function, args, kwargs), wholes, strict=True):
        if is_dtensor(tensor):
            local_part(tensor).copy_(own_part(whole, tensor))
    return tree_map(lambda value: as_replicated(value, mesh) if isinstance(value, torch.Tensor) else value, result)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator of torch.ops writes to."""
    schema = getattr(getattr(function, "default", function), "_schema", None)
    if schema is None:
        return []
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    return [given[argument.name] for argument in schema.arguments if argument.is_write and argument.name in given]


def as_replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The replicated DTensor of a tensor that is equal on all ranks."""
    return from_part(tensor, tensor, mesh, [Replicate()] * mesh.ndim)


def one_by_one(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
    """A foreach operator by the operator on each tensor, which `call` gets with its arguments."""
    if name == "norm":
        method: Callable[..., Any] = torch.linalg.vector_norm
    else:
        method = getattr(torch.Tensor, _METHODS.get(name, name))
    if name.startswith(("addcdiv", "addcmul")) and len(args) == 4:
        args, kwargs = args[:-1], {**kwargs, "value": args[-1]}
    count = next(len(value) for value in args if isinstance(value, (list, tuple)))
    results = [
        call(method, tuple(_nth(value, i) for value in args), {key: _nth(value, i) for key, value in kwargs.items()})
        for i in range(count)
    ]
    return None if name.endswith("_") else results


def _nth(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, (list, tuple)) else value
