"""Writing to rows of a sharded tensor: `embed.weight[0].zero_()`, `p.grad[:n] = 0`, `for row in weight`; and copies
of several at once.

A part along the sharded dim is no view in torch, but a copy that all ranks get, so a write to it would be lost without
a word. Such copies get a class of their own here: what is written to them is also written to the rows of the tensor
that this rank has. Where that is not known (parts of parts, diagonals) a write raises. (Checked on torch 2.11 to 2.15.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, local_slices, own_part, whole
from shardkit.errors import UsageError
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle
from shardkit.sharding.tensors.into_plain import into_plain

_aten = torch.ops.aten
_FILLS = (_aten.fill_.Tensor, _aten.fill_.Scalar)
_ASSIGNMENTS = (_aten.copy_.default, *_FILLS)
"""What torch calls for `tensor[...] = values`, without a method of the part. For a number: fill_.Tensor on the CPU and
CUDA, copy_ from an expanded tensor on other devices, fill_.Scalar from 2.15 on."""


class Source(Protocol):
    """What a copy is of."""

    def write(self, part: DTensor) -> None:
        """Writes the copy's values to those that this rank has."""


@dataclass(frozen=True)
class _Rows:
    """Which rows of a tensor, along a dim, a part is a copy of; `drops` the dim if it is one row by its number."""

    of: DTensor
    dim: int
    rows: range
    drops: bool = False

    def write(self, part: DTensor) -> None:
        values, target = local_part(part), local_part(self.of)
        values = values.unsqueeze(self.dim) if self.drops else values
        mine = local_slices(self.of)[self.dim]
        rows = torch.arange(self.rows.start, self.rows.stop, self.rows.step, device="cpu")
        (here,) = torch.where((rows >= mine.start) & (rows < mine.stop))
        chosen = values.index_select(self.dim, here.to(values.device))
        target.index_copy_(self.dim, (rows[here] - mine.start).to(target.device), chosen)


def _select(tensor: DTensor, dim: int, index: int) -> list[_Rows]:
    row = range(tensor.shape[dim])[index]
    return [_Rows(tensor, dim % tensor.dim(), range(row, row + 1), drops=True)]


def _slice(tensor: DTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> list[_Rows]:
    return [_Rows(tensor, dim % tensor.dim(), range(tensor.shape[dim])[start:end:step])]


def _split(tensor: DTensor, size: Any, dim: int = 0) -> list[_Rows]:
    length, dim = tensor.shape[dim], dim % tensor.dim()
    sizes = size if isinstance(size, (list, tuple)) else [size] * -(-length // size)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_Rows(tensor, dim, range(length)[start : start + each]) for start, each in zip(starts, sizes, strict=True)]


_PARTS: dict[Any, Callable[..., list[_Rows]]] = {
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.diagonal.default: lambda *_: [],
}


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        "sharded tensor: a part of it is a copy, so writing to this one would change nothing (got a part of a part, a "
        "diagonal, or a part that needs a gradient); under torch.no_grad() write to rows, weight[2:5].zero_(), or on "
        "all ranks take values = weight.full_tensor(), write to these, then weight.data = values."
    )


def _writing(name: str) -> Callable[..., Any]:
    method = getattr(DTensor, name)

    def write(part: Any, *args: Any, **kwargs: Any) -> Any:
        rows = vars(part).get("shardkit_rows")
        if rows is None or (part.requires_grad and torch.is_grad_enabled()):
            _refuse()
        result = method(part, *args, **kwargs)
        rows.write(part)
        return result

    return write


def _methods() -> dict[str, Any]:
    """The methods that write, of a part."""
    keep_values = {"requires_grad_", "detach_", "share_memory_", "rename_"}
    reshape = {"t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_"}
    reshape |= {"as_strided_", "sparse_resize_", "sparse_resize_and_clear_", "resize_as_sparse_"}
    known = set(dir(torch.Tensor))
    named = {name for name in known if name.endswith("_") and not name.startswith("_")} - keep_values
    operators = {name for name in known if name.startswith("__i") and f"__{name[3:]}" in known}
    methods = {name: _writing(name) for name in (named - reshape) | operators}
    return {**methods, **dict.fromkeys([*reshape, "__setitem__"], _refuse)}


CopiedPart: Any = type("CopiedPart", (DTensor,), {"__doc__": "A copy of a part of a sharded tensor.", **_methods()})


def as_copy(part: Any, rows: Source | None = None) -> Any:
    """The part, changed in place into one whose writes also reach these rows of the tensor, or what else it is a copy
    of; None: they raise."""
    part.__class__ = CopiedPart
    vars(part)["shardkit_rows"] = rows
    return part


@contextmanager
def written(tensor: DTensor) -> Iterator[None]:
    """Code that writes to the tensor: of a part, also to the rows of the tensor that it is a copy of. Raises if those
    are not known."""
    rows = vars(tensor).get("shardkit_rows")
    if isinstance(tensor, CopiedPart) and rows is None:
        _refuse()
    yield
    if rows is not None:
        rows.write(tensor)


@cache
def install() -> None:
    """Makes writes to parts reach the tensor. Has an effect once per process."""
    handle(_PARTS, _part)
    handle(_ASSIGNMENTS, _assign)
    handle([_aten._foreach_copy_.default], _assign_each)
    handle([_aten.unbind.int], _rows_one_by_one)


def _assign_each(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`torch._foreach_copy_(tensors, values)`, which torch lacks for sharded tensors."""
    for target, value in zip(*args[:2], strict=True):
        target.copy_(value, *args[2:], **kwargs)


def _rows_one_by_one(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """`tensor.unbind()`, `for row in tensor`, which torch refuses along the sharded dim."""

    def rows(tensor: DTensor, dim: int = 0) -> list[Any]:
        return [tensor.select(dim, row) for row in range(tensor.shape[dim])]

    return rows(*args, **kwargs)


def _part(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    found = as_torch_does(operator, args, kwargs)
    parts = found if isinstance(found, (list, tuple)) else [found]
    if isinstance(tensor, CopiedPart):
        rows: list[_Rows] = []
    elif any(_sharded_axes(part) < _sharded_axes(tensor) for part in parts):
        rows = _PARTS[operator](*args, **kwargs)
    else:
        return found
    for number, part in enumerate(parts):
        as_copy(part, rows[number] if rows else None)
    return found


def _sharded_axes(tensor: DTensor) -> int:
    return sum(placement.is_shard() for placement in tensor.placements)


def _is_alike(tensor: DTensor, other: DTensor) -> bool:
    return tensor.shape == other.shape and tensor.placements == other.placements


def _assign(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`tensor[...] = value`, and `tensor.copy_(value)`. Plain values are the same on every rank."""
    target: Any = args[0]
    value: Any = args[1]
    if not isinstance(target, DTensor):
        return into_plain(operator, args, kwargs)
    if not isinstance(target, CopiedPart):
        is_pending = any(placement.is_partial() for placement in target.placements)
        if isinstance(value, DTensor) and not is_pending and 1 in target.shape and not _is_alike(value, target):
            value = whole(value)  # torch takes a sharded dim of one element for one to broadcast
        if isinstance(value, DTensor) or is_pending:
            return as_torch_does(operator, args, kwargs)
        with torch.no_grad():
            mine = value if operator in _FILLS else own_part(value.expand(target.shape), target)
            operator(target.to_local(), mine)
        return target
    with torch.no_grad(), written(target):
        if isinstance(value, DTensor):
            as_torch_does(_aten.copy_.default, args, kwargs)
        elif operator in _FILLS:
            target.to_local().fill_(value)
        else:
            target.to_local().copy_(value)
    return target
