"""How the ranks of a save or load agree: small JSON values over a gloo group of their own, with its own timeout."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from shardkit.errors import CheckpointError

Result = TypeVar("Result")


class LostRank(CheckpointError):
    """A rank died or stopped answering while the others waited for it."""


@dataclass(frozen=True)
class Attempt(Generic[Result]):
    """What came of an action that all ranks took."""

    own: Result | None
    """What it returned here; None where it failed."""
    told: list[Any]
    """What every rank chose to tell of what it returned."""
    failure: str
    """What went wrong, as `rank 1 (host a): text`; empty where it went well everywhere."""


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

    def attempt(
        self, action: Callable[[], Result], tell: Callable[[Result], Any] = lambda result: None
    ) -> Attempt[Result]:
        """The action, on every rank and whatever happens on one. `tell` makes of its result what all learn, as JSON."""
        result, told, problem = None, None, None
        try:
            result = action()
            told = tell(result)
        except Exception as error:  # whatever it is: the others wait for this rank's answer
            problem = words(error)
        answers = self.gather([told, socket.gethostname(), problem])
        return Attempt(result, [told for told, _, _ in answers], _failure([answer[1:] for answer in answers]))


def _failure(answers: list[list[Any]]) -> str:
    """What went wrong on each (host, problem) in rank order: said once where several say it, nameless where all do."""
    ranks: dict[str, list[str]] = {}
    for rank, (host, problem) in enumerate(answers):
        if problem is not None:
            ranks.setdefault(problem.rstrip("."), []).append(f"rank {rank} (host {host})")
    said = []
    for text, those in ranks.items():
        also = f" and {len(those) - 1} more" if len(those) > 1 else ""
        said.append(text if len(those) == len(answers) else f"{those[0]}{also}: {text}")
    return "; ".join(said[:3]) + (f" (and {len(said) - 3} more)" if len(said) > 3 else "")


def words(error: Exception) -> str:
    """What an error says; of the operating system's the reason and the path."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or repr(error)


def start(timeout_s: float) -> Control:
    """A control group of all ranks. Collective. One process, or no process group: it agrees with itself."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Control(0, 1, None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Control(dist.get_rank(), dist.get_world_size(), group)
