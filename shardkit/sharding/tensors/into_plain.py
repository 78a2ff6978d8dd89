"""Plain tensors that take the values of sharded ones: `average.add_(p)`, `average.copy_(p)`, `average.data = p.data`,
`torch.add(average, p, out=average)`, `mask[p.abs() < 0.1] = 0`.

Every rank has the whole plain tensor, so the sharded ones are gathered for it.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from shardkit.distributed import named_barrier
from shardkit.distributed.tensors import is_dtensor, whole
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)


def into_plain(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The operator, which writes to a plain tensor: `out`, or its first argument. Collective."""
    target = kwargs.get("out", args[0])
    call = f"plain.{operator._schema.name.removeprefix('aten::')}(sharded)"

    def plain(value: Any) -> Any:
        return gathered(value, call).to(target.device) if is_dtensor(value) else value

    operator(*tree_map(plain, args), **kwargs)
    return target


def gathered(tensor: Any, call: str) -> torch.Tensor:
    """The whole sharded tensor, for a plain one. Collective; UsageError where some ranks do not make the call, such as
    an average that only the main process keeps: its gathers would be matched with those of a forward."""
    if tensor.dim():
        _tell()
        named_barrier.meet_at_first(call, UsageError)
    return whole(tensor)


@cache
def _tell() -> None:
    if dist.get_rank() == 0:
        log.info(
            "sharded tensor: a plain tensor takes the values of sharded ones, so every rank gathers these; a copy of "
            "the model that is given to prepare, too, is sharded alike and needs no communication."
        )
