"""Collectives on nested structures of tensors (dict, list, tuple, namedtuple).

They use the default process group; without one (a single process) they act on this rank alone. Every rank must call
them. Tensors may have any dtype: data that is only moved is sent as bytes.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardkit.distributed import accelerators, control, xla
from shardkit.distributed.nested import leaves, map_tensors, no_tensor
from shardkit.distributed.tensors import flat_bytes
from shardkit.errors import UsageError


def world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This rank's number; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


class Beside(Protocol):
    """What ranks compare where they meet, in the same message."""

    def text(self) -> str:
        """The same on ranks that agree."""

    def note_equal(self) -> None:
        """Called on all ranks where their texts are the same."""

    def compare(self) -> None:
        """Called on all ranks where they may not be. Collective; raises UsageError on all ranks, or on none."""


def gather(data: Any, beside: Beside | None = None) -> Any:
    """`data` with each tensor replaced by all ranks' tensors, concatenated along dim 0 in rank order, on every rank.

    A 0-dim tensor counts as one of length 1. Collective. Raises UsageError on all ranks where shapes or structures
    differ between ranks (`pad_across_processes` makes them equal).
    """
    refuse_different(data, "gather", beside)
    return map_tensors(lambda tensor: gather_one(_at_least_1d(tensor)), data)


class Real(NamedTuple):
    """What is real in a padded global batch."""

    samples: int
    ranks: int
    """The first ranks: those that have a real sample."""
    is_mixed: bool = False
    """Whether the last of them has padding, too."""


def gather_real(
    data: Any, real: Real | None, as_objects: bool = False, beside: Beside | None = None, copies: int = 1
) -> Any:
    """As `gather`, without the padding; None: no padding. Of each `copies` consecutive ranks, which have the same
    samples, those of the first; UsageError on all ranks where their values differ.

    Tensors that are 0-dim on each rank, such as a loss, have one value per rank: those of ranks with padding alone are
    left out. Other objects are returned as one list, as by `gather_object`: a list with one object per sample, or one
    object for all. Collective.
    """
    samples, ranks = (real.samples, real.ranks) if real else (None, None)
    if as_objects or not all(isinstance(leaf, torch.Tensor) for leaf in leaves(data)):
        refuse_different([], "gather_for_metrics", beside)
        return gather_object(data, copies)[: samples if isinstance(data, list) else ranks]
    refuse_different(data, "gather_for_metrics", beside)

    def real_part(tensor: torch.Tensor) -> torch.Tensor:
        gathered = _once(gather_one(_at_least_1d(tensor)).unflatten(0, (world_size(), -1)), copies)
        return gathered.flatten(0, 1)[: samples if tensor.dim() else ranks]

    return map_tensors(real_part, data)


def gather_repeated(data: Any, local: int, real: int, beside: Beside | None = None, copies: int = 1) -> Any | None:
    """As `gather`, with the first `local` values of each rank, and of these the first `real`, where each rank's 1-dim
    tensors hold one value repeated; else None. Collective; `local` may differ between ranks."""
    refuse_different(data, "gather_for_metrics", beside)
    gathered = map_tensors(lambda tensor: _once(gather_one(tensor).unflatten(0, (world_size(), -1)), copies), data)
    if not all(bool((rows == rows[:, :1]).all()) for rows in leaves(gathered)):
        return None
    counts = gather_one(torch.tensor([local], device=leaves(data)[0].device))[::copies].tolist()
    if not all(counts):
        return None
    return map_tensors(lambda rows: torch.cat([row[:n] for row, n in zip(rows, counts, strict=True)])[:real], gathered)


def _once(by_rank: torch.Tensor, copies: int) -> torch.Tensor:
    """(ranks, ...) -> (ranks / copies, ...): of each `copies` consecutive ranks the values of the first."""
    if copies == 1:
        return by_rank
    of_groups = by_rank.unflatten(0, (-1, copies))
    first, others = of_groups[:, :1], of_groups[:, 1:]
    is_exact = not (first.is_floating_point() or first.is_complex())
    if not (torch.equal(others, first.expand_as(others)) or (not is_exact and _are_close(others, first))):
        raise UsageError(
            f"gather_for_metrics: the {copies} ranks that share a sequence have different values (of slices, inside of "
            "context_parallel?); evaluate outside of it, where each has whole sequences, or use accelerator.reduce for "
            "a loss, and accelerator.gather for the values of all ranks."
        )
    return of_groups[:, 0]


def _are_close(others: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether values differ by no more than what kernels add up in another order."""
    tolerance = 1e-3 if first.dtype.itemsize >= 4 else 3e-2
    return torch.allclose(others, first.expand_as(others), rtol=tolerance, atol=tolerance, equal_nan=True)


def gather_object(data: Any, copies: int = 1) -> list[Any]:
    """All ranks' objects as one list in rank order; if every rank gives a list, the lists are concatenated. Of each
    `copies` consecutive ranks, those of the first.

    Collective. Objects are pickled between the ranks of this run, never to or from a file.
    """
    if world_size() == 1:
        return list(data) if isinstance(data, list) else [data]
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, data)
    everyone = everyone[::copies]
    if all(isinstance(part, list) for part in everyone):
        return [item for part in everyone for item in part]
    return everyone


def reduce(
    data: Any,
    reduction: Literal["mean", "sum", "max", "min", "none"] = "sum",
    scale: float = 1.0,
    beside: Beside | None = None,
) -> Any:
    """`data` with each tensor replaced by its mean, sum, max or min over all ranks, times `scale`, on every rank.

    Same shapes. Collective. As in torch, the mean of integers is a float, the sum of bools and of integers below 32
    bits is int64, and NaN stays NaN. Raises UsageError on all ranks where shapes differ.
    """
    if reduction not in ("mean", "sum", "max", "min", "none"):
        raise UsageError(f"reduce: unknown reduction (got {reduction!r}); use mean, sum, max, min or none.")
    if reduction == "none":
        return data
    refuse_different(data, "reduce", beside)
    return map_tensors(lambda tensor: reduce_one(tensor, reduction, scale), data)


def mean_number(value: float) -> float:
    """The mean over all ranks of a number, on every rank. Collective."""
    return float(reduce(torch.tensor(value, dtype=torch.float64, device="cpu"), "mean"))


def broadcast(data: Any, from_process: int = 0) -> Any:
    """`data` with each tensor replaced by that of rank `from_process`, on every rank. Collective."""
    _refuse_other_rank(from_process)
    refuse_different(data, "broadcast")
    return map_tensors(lambda tensor: broadcast_one(tensor, from_process), data)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The list, filled in place with rank `from_process`'s items. Collective; pickles, as in `gather_object`."""
    _refuse_other_rank(from_process)
    if world_size() > 1:
        dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def pad_across_processes(data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """`data` with each tensor padded along `dim` to the longest of all ranks, with `pad_index`, at the end or front.

    Collective. A tensor with too few dims for `dim` is returned unchanged. UsageError on all ranks where some have
    other tensors, or such a tensor where others have one with the dim.
    """
    attempt = control.start().attempt(
        lambda: map_tensors(lambda tensor: tensor, data),
        answer=lambda tensors: [_length(tensor, dim) for tensor in leaves(tensors)],
        judge=_longest,
    )
    if attempt.failure:
        raise UsageError(f"pad_across_processes: {attempt.failure.rstrip('.')}.")
    lengths = iter(attempt.verdict)
    return map_tensors(lambda tensor: _padded(tensor, dim, next(lengths), pad_index, pad_first), attempt.own)


def wait_for_everyone() -> None:
    """Barrier: returns on each rank when all ranks have called it. Collective."""
    if world_size() == 1:
        return
    # Of a group without the CPU NCCL would guess the device from the rank's number, and torch warns of it.
    own = None if control.takes_host_memory() else [accelerators.current(accelerators.kind() or "cpu").index]
    dist.barrier(device_ids=own)


def _moved_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: backends can move dtypes that they cannot reduce."""
    if tensor.layout is not torch.strided:
        raise _no_dense_tensor(tensor)
    return flat_bytes(tensor)


def _no_dense_tensor(tensor: torch.Tensor) -> UsageError:
    kind = "a nested tensor" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}"
    return UsageError(f"a collective takes dense tensors (got {kind}); make it one: to_dense(), to_padded_tensor(0).")


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()


def _is_of_all(tensor: torch.Tensor) -> bool:
    """Whether the tensor is that of all ranks together already: the only rank's, or one on XLA devices."""
    return world_size() == 1 or xla.is_xla(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is of all ranks, which scripts then bring to host memory."""
    return xla.whole(tensor) if xla.is_xla(tensor) else tensor.clone()


def gather_one(tensor: torch.Tensor, dim: int = 0, group: Any = None) -> torch.Tensor:
    """The tensors of this shape, with at least one dim, of all ranks or of torch's group, concatenated along a dim.
    Collective."""
    if _is_of_all(tensor):
        return _copy(tensor)
    placed = _placed(tensor)
    own = _moved_bytes(placed)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    whole = torch.cat([part.view(tensor.dtype).reshape(tensor.shape) for part in parts], dim)
    return whole.to(tensor.device)


def reduce_one(tensor: torch.Tensor, reduction: str, scale: float = 1.0) -> torch.Tensor:
    """As `reduce`, of one tensor, whose shape is the same on all ranks. Collective."""
    value = tensor.detach().to(_reduced_dtype(tensor.dtype))
    if _is_of_all(tensor):
        ranks, found = 1, _copy(value)
    else:
        ranks, found = world_size(), _over_ranks(_placed(value), reduction)
    if reduction == "mean":
        found = found / ranks
    if scale != 1.0:
        found = found * scale
    is_one_of_them = reduction in ("max", "min") and scale == 1.0 and tensor.dtype is not torch.bool
    is_same = tensor.is_floating_point() or is_one_of_them
    return found.to(tensor.device, tensor.dtype if is_same else found.dtype)


def _reduced_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which values of this dtype are reduced: backends lack the small ones, or have no room for sums in them."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    is_small = dtype.itemsize < 4 or dtype is torch.uint32
    return torch.int64 if is_small and not dtype.is_complex else dtype


def _over_ranks(value: torch.Tensor, reduction: str) -> torch.Tensor:
    """A reduced copy of the value, in order in memory, as on all ranks."""
    found = value.clone() if value.is_sparse else value.clone(memory_format=torch.contiguous_format)
    if reduction not in ("max", "min"):
        dist.all_reduce(found)
        return found
    dist.all_reduce(found, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.MIN)
    if value.is_floating_point():  # backends compare, and NaN is neither less nor greater: it may be lost
        is_nan = value.isnan().to(torch.uint8).contiguous()
        dist.all_reduce(is_nan, dist.ReduceOp.MAX)
        found.masked_fill_(is_nan.bool(), torch.nan)
    return found


def broadcast_one(tensor: torch.Tensor, from_process: int, group: Any = None) -> torch.Tensor:
    """The tensor of this shape of a rank, given by its number among all ranks, on all ranks or those of torch's group.
    Collective."""
    if _is_of_all(tensor):
        return _copy(tensor.detach())
    moved = _moved_bytes(_placed(tensor)).clone()
    dist.broadcast(moved, src=from_process, group=group)
    return moved.view(tensor.dtype).reshape(tensor.shape).to(tensor.device)


def _refuse_other_rank(from_process: int) -> None:
    if world_size() > 1 and not 0 <= from_process < world_size():  # alone, a script for several runs as it is
        raise UsageError(
            f"broadcast: from_process is not a rank of this run (got {from_process}); give a number from 0 to "
            f"{world_size() - 1}."
        )


def _length(tensor: torch.Tensor, dim: int) -> int | None:
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None


def _longest(lengths: list[list[int | None]]) -> list[int | None]:
    """The largest length of each tensor over all ranks. UsageError where some ranks lack a tensor, or its dim."""
    if len({tuple(length is None for length in of_rank) for of_rank in lengths}) > 1:
        raise UsageError(
            f"ranks have different tensors (got lengths {'; '.join(map(str, lengths[:4]))} by rank); give tensors of "
            "the same structure and number of dims on all ranks"
        )
    return [None if None in of_tensor else max(of_tensor) for of_tensor in zip(*lengths, strict=True)]


def _padded(tensor: torch.Tensor, dim: int, length: int | None, pad_index: float, pad_first: bool) -> torch.Tensor:
    missing = 0 if length is None else length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    padding = tensor.new_full(shape, pad_index)
    return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim=dim)


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on a device that the default group's backend supports."""
    if world_size() == 1 or tensor.device.type in str(dist.get_backend_config()):
        return tensor
    return tensor.to(_device())


def _device() -> torch.device:
    """A device that the default group's backend supports: the CPU if possible, else this rank's accelerator."""
    return torch.device("cpu" if "cpu" in str(dist.get_backend_config()) else accelerators.kind() or "cpu")


def refuse_different(data: Any, what: str, beside: Beside | None = None) -> None:
    """Raises UsageError on all ranks where structure, shapes or dtypes differ, or what is compared beside them.
    Collective: 8 bytes a rank."""
    if world_size() == 1:
        map_tensors(lambda tensor: tensor, data)
        return
    problem = None
    try:
        description = _description(data)
    except UsageError as error:
        problem, description = f"{what}: {error}", ""
    text = description + (beside.text() if beside else "")
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") if problem is None else -1
    value = torch.tensor([digest, -digest], device="cpu")  # reading one on a device would wait for the device
    dist.all_reduce(value, dist.ReduceOp.MIN, group=control.on_cpu())
    if digest >= 0 and int(value[0]) == -int(value[1]) == digest:
        if beside:
            beside.note_equal()
        return
    if beside:
        beside.compare()  # first: tensors of different data may differ in shape
    everyone = control.start()
    everyone.agree(problem, error=UsageError)
    descriptions = everyone.exchange(description)
    if len(set(descriptions)) > 1:
        for_samples = ""
        if what in ("gather", "gather_for_metrics"):
            for_samples = "; a list of samples that differ: gather_for_metrics(samples, use_gather_object=True)"
        raise UsageError(
            f"{what}: ranks have different tensors ("
            + "; ".join(f"rank {number}: {text}" for number, text in enumerate(descriptions))
            + f"); make them equal, for instance with accelerator.pad_across_processes(...){for_samples}."
        )


def _description(data: Any) -> str:
    """Structure, shapes and dtypes as one line of text."""
    if isinstance(data, torch.Tensor):
        if data.is_nested or data.is_quantized:
            raise _no_dense_tensor(data)
        layout = "" if data.layout is torch.strided else f" {data.layout}"
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}{layout}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {_description(value)}" for key, value in data.items()) + "}"
    if isinstance(data, (list, tuple)):
        return "(" + ", ".join(_description(value) for value in data) + ")"
    raise no_tensor(data)
