"""The ranks that share a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit.config.schema import Config
from shardkit.distributed import collectives
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from shardkit.distributed.process import Process

IGNORED = -100
"""The label of positions that are not learned from, in Transformers and by default in torch's losses."""


@dataclass(frozen=True)
class ContextGroup:
    """This rank's context group: consecutive ranks that read the same samples, each with a slice of every sequence."""

    size: int = 1
    rank: int = 0
    """This rank's number in the group, and its slice's in the sequence."""
    process_group: Any = None
    """torch's, where the group has several ranks."""

    @property
    def first(self) -> int:
        """The number, among all ranks, of the group's first."""
        return dist.get_process_group_ranks(self.process_group)[0]

    def part(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor of the whole sequence."""
        each = whole.size(dim) // self.size
        return whole.narrow(dim, self.rank * each, each).contiguous()

    def gathered(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The parts of all ranks of the group, joined along a dim; without gradients. Collective over the group."""
        return collectives.gather_one(part.detach(), dim, self.process_group)

    def of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the group's first rank, on all of them; without gradients. Collective over the group."""
        return collectives.broadcast_one(tensor, self.first, self.process_group)


def build_group(config: Config, process: Process) -> ContextGroup:
    """This rank's context group. Collective: every rank must call it. Raises ConfigError where groups of that size do
    not make up the ranks."""
    size = config.shardkit.mesh.context_size
    if size == 1:
        return ContextGroup()
    if process.world_size % size:
        raise ConfigError(
            f"shardkit.mesh.context_size: does not divide the number of ranks (got {size} of {process.world_size}); "
            "choose a divisor."
        )
    of_ranks = [list(range(first, first + size)) for first in range(0, process.world_size, size)]
    timeout = timedelta(seconds=config.shardkit.launch.process_group_timeout_s)
    own, _ = dist.new_subgroups_by_enumeration(of_ranks, timeout, group_desc="context")
    return ContextGroup(size, process.rank % size, own)
