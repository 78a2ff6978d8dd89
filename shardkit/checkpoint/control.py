"""How the ranks of a save or load agree: small JSON values over a gloo group of their own, with its own timeout."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardkit.errors import CheckpointError


class LostRank(CheckpointError):
    """A rank died or stopped answering while the others waited for it."""


@dataclass
class Control:
    """The ranks that save together. All methods are collective: every rank must call them, in the same order."""

    rank: int
    world_size: int
    group: Any
    tick: Callable[[], None] = lambda: None
    """Called between pieces of work, so that whoever watches this rank sees it move."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order. LostRank where one does not answer in time."""
        self.tick()
        if self.group is None:
            return [value]
        try:
            return [json.loads(text) for text in self._gather_bytes(json.dumps(value).encode())]
        except (RuntimeError, ValueError) as error:  # gloo tells of lost peers in a bare RuntimeError
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
            raise LostRank(f"a rank died or did not answer in time ({reason})") from error

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        length = torch.tensor([len(data)])
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length, group=self.group)
        sizes = [int(item) for item in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self.group)
        return [bytes(text[:size].tolist()) for text, size in zip(texts, sizes, strict=True)]

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value."""
        return self.gather(value if self.rank == 0 else None)[0]

    def problems(self, problem: str | None) -> list[str]:
        """What went wrong on each rank, as `rank 1 (host): text`; empty where nothing did."""
        answers = self.gather(None if problem is None else f"rank {self.rank} ({socket.gethostname()}): {problem}")
        return [answer for answer in answers if answer is not None]


def start(timeout_s: float) -> Control:
    """A control group of all ranks. Collective. One process, or no process group: it agrees with itself."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Control(0, 1, None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Control(dist.get_rank(), dist.get_world_size(), group)
