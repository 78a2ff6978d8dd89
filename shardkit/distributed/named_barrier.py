"""A barrier before collective operations that names the ranks that do not arrive.

    named_barrier.meet("save_state", timeout_s, UsageError)

A call that only some ranks make (inside `if accelerator.is_main_process`, or in one rank's `except`) would be matched
with another collective of the other ranks: an error at an unrelated line, or a hang. Here a rank counts itself in the
store of the default process group, and starts no collective before all have arrived.
"""

import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardkit.distributed import rank_store
from shardkit.distributed.control import is_simulated
from shardkit.errors import ShardkitError
from shardkit.log import get_logger
from shardkit.wording import ranks_text

log = get_logger(__name__)

# When a waiting rank logs a warning. Ranks of a run are seconds apart, unless one is busy alone, or never comes.
WARN_AFTER_S = 20.0
# How long a rank waits in an `except`: the others, without its error, probably wait for it in another call.
IN_EXCEPT_S = 30.0
# How long `meet_at_first` waits in the middle of a step, where ranks are seconds apart.
IN_STEP_S = 60.0
# Delay before it logs the error being handled: a script may train on in an `except`, where all ranks arrive at once.
PATIENCE_S = 1.0
# How often a waiting rank asks whether another one was started again.
ASK_S = 1.0
# How often `meet_at_first` meets.
FIRST_TIMES = 2
# Up to this many ranks, each may query every other.
MANY = 256


_times: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""Calls of `meet_at_first`, by process group."""


class NotMetError(Exception):
    """Not all ranks have made a call. `what` has happened, and what to do."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")
        self.what = what


def meet(call: str, timeout_s: float, error: type[ShardkitError]) -> None:
    """As `await_all`; raises `error` with the call and the reason."""
    try:
        await_all(call, timeout_s)
    except NotMetError as reason:
        raise error(f"{call}: {reason}") from reason.__cause__


def meet_at_first(call: str, error: type[ShardkitError], timeout_s: float | None = None) -> bool:
    """`meet` the first two times that this process group makes this call: those that some ranks leave out, they leave
    out from the start. Whether it has met. Without spaces in the call; by default within IN_STEP_S."""
    if not dist.is_initialized():
        return False
    times = _times.setdefault(dist.group.WORLD, Counter())
    if times[call] >= FIRST_TIMES:
        return False
    meet(call, timeout_s or IN_STEP_S, error)
    times[call] += 1  # only now: those that have waited in vain meet the others at their next call
    return True


def await_all(call: str, timeout_s: float) -> None:
    """Returns when all ranks have made this call. Collective; NotMetError names the ranks that did not come in time.

    A rank that is handling an exception waits for at most 30 s; the exception is logged first, and quoted in the error.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_simulated():
        return
    arrivals = _Arrivals(call, dist.get_rank(), dist.get_world_size())
    try:
        arrivals.arrive()
        if not arrivals.wait(PATIENCE_S):
            _wait_long(arrivals, timeout_s)
    except RuntimeError as lost:  # raised by torch when the process that hosts the store has ended
        raise NotMetError(f"the ranks' store does not answer ({lost})", "a rank has ended, see its error.") from lost
    except BaseException:
        with suppress(RuntimeError):
            arrivals.leave()
        raise


def _wait_long(arrivals: "_Arrivals", timeout_s: float) -> None:
    handled = sys.exc_info()[1]
    limit_s = timeout_s if handled is None else min(timeout_s, IN_EXCEPT_S)
    text = f"{arrivals.call}: rank {arrivals.rank} waits for the others, {limit_s:.0f} s at most"
    if handled is not None:
        said = "".join(traceback.format_exception(handled))
        log.error("%s. It was called while this was handled:\n%s", text, said)
    if arrivals.wait(min(WARN_AFTER_S, limit_s) - PATIENCE_S):
        return
    if arrivals.is_first():
        log.warning("%s: %s; %s", text, arrivals.who_is_missing(), _ADVICE)
    if arrivals.wait(limit_s - min(WARN_AFTER_S, limit_s)):
        return
    missing = arrivals.who_is_missing()
    if arrivals.leave():
        cause = "" if handled is None else f"\n  It was called while handling {type(handled).__name__}: {handled}"
        raise NotMetError(f"{missing} after {limit_s:.0f} s", f"{_ADVICE}{cause}") from handled


def _refuse_new_start() -> None:
    rank = rank_store.started_again()
    if rank is not None:
        advice = (
            f"this rank ends, too, and torchrun starts it again if --max-restarts allows it; see rank {rank}'s error."
        )
        raise NotMetError(f"rank {rank} has ended, and was started again", advice)


_ADVICE = "every rank must call it, in the same order as the others, outside of `if accelerator.is_main_process`."


@dataclass
class _Arrivals:
    """One call of all ranks. `total` counts arrivals at all barriers of this name: no rank reaches the next one before
    all have reached this one, so the barrier's number follows from it. `at` is the latest call of each rank."""

    call: str
    rank: int
    world_size: int
    number: int = 0
    _is_out: bool = False

    def __post_init__(self) -> None:
        self._store = dist.PrefixStore("shardkit/meeting/", distributed_c10d._get_default_store())

    def arrive(self) -> None:
        """Counts this rank as arrived."""
        self.number = (self._store.add(f"total/{self.call}", 1) - 1) // self.world_size + 1
        self._store.set(f"at/{self.rank}", f"{self.call} {self.number}")

    def wait(self, seconds: float) -> bool:
        """Whether all arrived within these seconds. The pause between two polls is an eighth of the time waited so far:
        a rank goes on at most that much later than it could. Many ranks poll less often. NotMetError where a rank has
        ended and was started again: it waits for the others in its first call."""
        began_s, asked_s = time.monotonic(), 0.0
        shortest, longest = 0.0005 + self.world_size / 100_000, 0.02 + self.world_size / 5000
        while not self.is_complete():
            waited_s = time.monotonic() - began_s
            if waited_s >= seconds:
                return False
            if waited_s >= asked_s + ASK_S:
                asked_s = waited_s
                _refuse_new_start()
            time.sleep(min(max(shortest, waited_s / 8), longest, seconds - waited_s))
        return True

    def is_complete(self) -> bool:
        """Whether all ranks have arrived."""
        return self._store.add(f"total/{self.call}", 0) >= self.number * self.world_size

    def leave(self) -> bool:
        """Withdraws this rank's arrival; False if all have arrived in the meantime, or it was withdrawn before."""
        if self._is_out or self.is_complete():
            return False
        self._is_out = True
        self._store.add(f"total/{self.call}", -1)
        self._store.set(f"at/{self.rank}", f"{self.call} given-up")
        return True

    def is_first(self) -> bool:
        """Whether no rank of a smaller number waits here: only the first one logs."""
        return not any(self._is_here(rank) for rank in range(self.rank))

    def who_is_missing(self) -> str:
        """ "rank 1 has not come", and which call it waits in, if it is a call of shardkit."""
        if self.world_size > MANY and not self.is_first():  # queries of all ranks for all ranks would take minutes
            return "not all ranks have come, see the first rank's error"
        missing = [rank for rank in range(self.world_size) if not self._is_here(rank)]
        known = [text for rank in missing[:8] if (text := self._where_it_is(rank))]
        said = f"{ranks_text(missing)} {'has' if len(missing) == 1 else 'have'} not come"
        return f"{said} ({', '.join(known)})" if known else said

    def _is_here(self, rank: int) -> bool:
        return self._at(rank) == [self.call, str(self.number)]

    def _where_it_is(self, rank: int) -> str | None:
        """The call that a missing rank waits in; None if unknown."""
        match self._at(rank):
            case [call, "given-up"]:
                return f"rank {rank} has given up {call}"
            case [call, number] if not _Arrivals(call, rank, self.world_size, int(number)).is_complete():
                return f"rank {rank} waits in {call}"
        return None

    def _at(self, rank: int) -> list[str]:
        key = f"at/{rank}"
        return self._store.get(key).decode().split() if self._store.check([key]) else []
