"""torch.distributed's collectives on sharded tensors, as scripts have them that were parallel before.

    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

Under DDP every rank has the whole tensor, the same on all, and a collective gives what it gives for equal tensors. So
it is here: a sum over n ranks is n times the tensor, a mean, a maximum and a broadcast leave it as it is. torch has no
such operators on DTensors. Those that gather or scatter are refused in words, and so is a group with ranks outside of
the tensor's mesh (of a script's own tensor parallelism), which may have another tensor.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit.errors import UsageError
from shardkit.sharding.tensors.dtensor_operators import handle
from shardkit.sharding.tensors.settled import is_pending, settle_in_place

_c10d = torch.ops.c10d
_REFUSED = (
    *("reduce_", "gather_", "scatter_", "allgather_", "_allgather_base_", "allgather_coalesced_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_"),
    *("reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_"),
)


@cache
def install() -> None:
    """Makes collectives on sharded tensors those of equal tensors. Has an effect once per process."""
    handle([_c10d.allreduce_.default, _c10d.allreduce_coalesced_.default, _c10d.broadcast_.default], _of_equal_tensors)
    handle([getattr(_c10d, name).default for name in _REFUSED], _refuse)


def _of_equal_tensors(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensors, changed in place by what the operation makes of equal numbers. Collective over its group: it runs on
    two numbers, which tell what it does, whatever its name, and which give the handle that the caller waits for."""
    tensors, group, *others = args
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if len(sharded) < len(tensors):
        raise UsageError(
            f"{_name(operator)}: some of its tensors are sharded and others are not; call it for each kind."
        )
    ranks = {*dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))}
    if not all(ranks.issubset(tensor.device_mesh.mesh.flatten().tolist()) for tensor in sharded):
        _refuse(operator, args, kwargs)
    numbers = torch.tensor([1.0, 2.0], device=sharded[0].device)
    *_, work = operator([numbers], group, *others, **kwargs)
    work.wait()
    factor, twice = numbers.tolist()
    if twice != 2 * factor:
        _refuse(operator, args, kwargs)
    for tensor in sharded:
        if is_pending(tensor):
            settle_in_place(tensor)
        if factor != 1:
            tensor._local_tensor.mul_(factor)
    return tensors, work


def _refuse(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UsageError(
        f"{_name(operator)}: a rank has only a part of a sharded tensor; remove the call (gradients are averaged by "
        "accelerator.backward, weights are equal on all ranks), or take tensor.full_tensor() on all ranks before."
    )


def _name(operator: Any) -> str:
    return f"torch.distributed ({operator.__name__.partition('.')[0].strip('_')})"
