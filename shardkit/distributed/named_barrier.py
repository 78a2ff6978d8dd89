"""All ranks come together before they do something in which each waits for the others; who waits says for whom.

    meeting.meet("save_state", timeout_s, UsageError)

A call that only some ranks make (inside `if accelerator.is_main_process`, or in one rank's `except`) would meet another
collective of the others: an error at an innocent line, or a wait without end. Here a rank counts itself in the store of
the default process group, and sends nothing to the others before all have come.
"""

import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardkit.distributed.control import is_simulated, ranks_text
from shardkit.errors import ShardkitError
from shardkit.log import get_logger

logger = get_logger(__name__)

# When a rank that waits says so. Ranks of one run are seconds apart at most, unless one of them does not come.
WARN_AFTER_S = 10.0
# How long a rank waits in an `except`: the others, without its error, are likely to wait for it somewhere else.
IN_EXCEPT_S = 30.0
# Before it logs the error that it is handling: a script may train on for long in an `except`, and all may come at once.
PATIENCE_S = 1.0
# Ranks up to which each of them may ask for each other.
MANY = 256


def meet(call: str, timeout_s: float, error: type[ShardkitError]) -> None:
    """Returns when all ranks have made this call. Collective; `error` names the ranks that did not come in time.

    While the rank handles an exception it waits for 30 s at most; the exception is logged first, and is in the text.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_simulated():
        return
    place = _Arrivals(call, dist.get_rank(), dist.get_world_size())
    try:
        place.arrive()
        if not place.wait(PATIENCE_S):
            _wait_long(place, timeout_s, error)
    except RuntimeError as lost:  # what torch raises where the process that keeps the store is gone
        raise error(f"{call}: the ranks' store does not answer ({lost}); a rank has ended, see its error.") from lost
    except BaseException:
        with suppress(RuntimeError):
            place.leave()
        raise


def _wait_long(place: "_Arrivals", timeout_s: float, error: type[ShardkitError]) -> None:
    handled = sys.exc_info()[1]
    limit_s = timeout_s if handled is None else min(timeout_s, IN_EXCEPT_S)
    text = f"{place.call}: rank {place.rank} waits for the others, {limit_s:.0f} s at most"
    if handled is not None:
        said = "".join(traceback.format_exception(handled))
        logger.error("%s. It was called while this was handled:\n%s", text, said)
    if place.wait(min(WARN_AFTER_S, limit_s) - PATIENCE_S):
        return
    if place.is_first():
        logger.warning("%s: %s; %s", text, place.who_is_missing(), _ADVICE)
    if place.wait(limit_s - min(WARN_AFTER_S, limit_s)):
        return
    missing = place.who_is_missing()
    if place.leave():
        cause = "" if handled is None else f"\n  It was called while handling {type(handled).__name__}: {handled}"
        raise error(f"{place.call}: {missing} after {limit_s:.0f} s; {_ADVICE}{cause}") from handled


_ADVICE = "every rank must call it, in the same order as the others, outside of `if accelerator.is_main_process`."


@dataclass
class _Arrivals:
    """One call of all ranks. `total` counts arrivals at all meetings of this name: nobody comes to the next one before
    all have come to this one, so that the number of a meeting follows from it. `at` is what each rank does last."""

    call: str
    rank: int
    world_size: int
    number: int = 0
    _is_out: bool = False

    def __post_init__(self) -> None:
        self._store = dist.PrefixStore("shardkit/meeting/", distributed_c10d._get_default_store())

    def arrive(self) -> None:
        """Count this rank in."""
        self.number = (self._store.add(f"total/{self.call}", 1) - 1) // self.world_size + 1
        self._store.set(f"at/{self.rank}", f"{self.call} {self.number}")

    def wait(self, seconds: float) -> bool:
        """Whether all came within these seconds. Looks often at first; the more ranks, the rarer later."""
        deadline, pause = time.monotonic() + seconds, 0.0005
        while not self.is_complete():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, 0.02 + self.world_size / 5000)
        return True

    def is_complete(self) -> bool:
        """Whether all have come."""
        return self._store.add(f"total/{self.call}", 0) >= self.number * self.world_size

    def leave(self) -> bool:
        """Count this rank out, so that it can come again; False where all came at the last moment, or it is out."""
        if self._is_out or self.is_complete():
            return False
        self._is_out = True
        self._store.add(f"total/{self.call}", -1)
        self._store.set(f"at/{self.rank}", f"{self.call} given-up")
        return True

    def is_first(self) -> bool:
        """Whether no rank of a smaller number waits here: one of them speaks for all."""
        return not any(self._is_here(rank) for rank in range(self.rank))

    def who_is_missing(self) -> str:
        """ "rank 1 has not come", and where it is, if it waits in another call of ours."""
        if self.world_size > MANY and not self.is_first():  # all of them asking for all would take the store minutes
            return "not all ranks have come, see the first rank's error"
        missing = [rank for rank in range(self.world_size) if not self._is_here(rank)]
        known = [text for rank in missing[:8] if (text := self._where_it_is(rank))]
        said = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} not come"
        return f"{said} ({', '.join(known)})" if known else said

    def _is_here(self, rank: int) -> bool:
        return self._at(rank) == [self.call, str(self.number)]

    def _where_it_is(self, rank: int) -> str | None:
        """What is known of a rank that is not here; None: it does something else."""
        match self._at(rank):
            case [call, "given-up"]:
                return f"rank {rank} has given up {call}"
            case [call, number] if not _Arrivals(call, rank, self.world_size, int(number)).is_complete():
                return f"rank {rank} waits in {call}"
        return None

    def _at(self, rank: int) -> list[str]:
        key = f"at/{rank}"
        return self._store.get(key).decode().split() if self._store.check([key]) else []
