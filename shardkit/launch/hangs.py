"""When a run hangs, and which rank the others wait for. Pure: from what is known of every rank to a verdict.

Nobody is ended for a lack of progress alone: a rank may compute for hours on one line. A run hangs where a rank waits
for its peers in a collective, or no rank uses any CPU time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from shardkit.launch.rank_files import RankProgress
from shardkit.launch.stacks import Stack

PATIENCE = 3
"""So many hang timeouts are given to a rank that others wait for while it is at work: a slow step, or a busy loop."""


@dataclass
class Rank:
    """What is known of one rank's process. `worked_s`: when it, or what it has started, was last seen to work."""

    place: RankProgress
    exit_code: int | None = None
    ended_s: float | None = None
    is_gone: bool = False
    stopped_since_s: float | None = None
    cpu_s: float | None = None
    worked_s: float = 0.0

    @property
    def runs(self) -> bool:
        return self.exit_code is None and not self.is_gone

    @property
    def has_posted(self) -> bool:
        """Whether it says where it is: a script with an Accelerator."""
        return self.place.is_watched or self.place.phase != "starting"


@dataclass(frozen=True)
class Seen:
    """What a rank did while it was looked at a few times: its last stack, None where it wrote none; what changed."""

    stack: Stack | None
    moves: bool = False
    """Its main thread has been at different lines."""
    uses_cpu: bool = False
    is_in_collective: bool = False
    """It was, each time."""

    @property
    def works(self) -> bool:
        return self.moves or self.uses_cpu

    @property
    def waits(self) -> bool:
        """It stands in a collective, or asks again and again, and its peers do not come."""
        if self.stack is None:
            return False
        return (self.is_in_collective and not (self.moves and self.uses_cpu)) or (
            self.stack.is_in_backward and not self.works
        )


class Verdict(Enum):
    WORK = "it goes on"
    SLOW = "it goes on, but somebody should look"
    HANG = "it does not go on"


def is_due(running: Mapping[int, Rank], timeout_s: float, now: float) -> bool:
    """Whether the ranks have to be looked at: none has moved for `timeout_s`, or one is stopped from outside so long.

    Of a script without an Accelerator: one has used no CPU time for so long. A rank that has paused may take any time.
    """
    if any(rank.stopped_since_s and now - rank.stopped_since_s > timeout_s for rank in running.values()):
        return True
    ranks = running.values()
    if any(rank.has_posted and not rank.place.is_watched for rank in ranks):
        return False
    if any(rank.place.is_watched for rank in ranks):
        return min(now - rank.place.since_s for rank in ranks) > timeout_s
    return len(ranks) > 1 and any(now - rank.worked_s > timeout_s for rank in ranks)


def judge(
    running: Mapping[int, Rank], seen: Mapping[int, Seen], timeout_s: float, now: float, has_others: bool = False
) -> Verdict:
    """What becomes of ranks that were due, and have been looked at. `has_others`: other machines have ranks too, and
    where all of this one wait, one of those is at work, or stands still and is judged there."""
    if any(one.stack is not None and one.stack.is_debugged for one in seen.values()):
        return Verdict.WORK
    somebody_waits = any(one.waits for one in seen.values())
    posted = [rank.place for rank in running.values() if rank.has_posted]
    all_wait = len(seen) == len(running) and all(one.waits for one in seen.values())
    if any(one.works and not one.waits for one in seen.values()) or (has_others and all_wait):
        if not posted:
            return Verdict.SLOW if somebody_waits else Verdict.WORK
        out_of_patience = min(now - place.since_s for place in posted) > PATIENCE * timeout_s
        return Verdict.HANG if somebody_waits and out_of_patience else Verdict.SLOW
    # A script without an Accelerator, all asleep: it may serve somebody, or wait for a file.
    return Verdict.HANG if somebody_waits or posted else Verdict.SLOW


@dataclass(frozen=True)
class HangRow:
    """A rank's line in the table of a hang. The smallest `order` is the rank that the others wait for: one that left,
    one stopped from outside, one not inside a collective; among equals the one that is furthest behind."""

    rank: int
    text: str
    waits: bool
    order: tuple[bool, bool, int, float]


def rows_of(ranks: Mapping[int, Rank], seen: Mapping[int, Seen], now: float) -> list[HangRow]:
    """One a rank: step, phase, seconds since it last moved, and the line of the script that it is at."""
    rows = []
    for number in sorted(ranks):
        rank, waits = ranks[number], _waits(seen, number)
        order = (rank.runs and not rank.stopped_since_s, waits, rank.place.step, rank.place.since_s)
        rows.append(HangRow(number, _row(number, rank, seen, now), waits, order))
    return rows


def render(rows: Iterable[HangRow], timeout_s: float, logs: str) -> str:
    """What ends a run that hangs: the table of all ranks, and which of them the others wait for."""
    rows = sorted(rows, key=lambda row: row.rank)
    first = min(rows, key=lambda row: row.order).rank
    lines = [f"launch: HANG, no progress for {timeout_s:g} s", *(row.text for row in rows)]
    lines.append(f"  First to stop: rank {first}. The stacks of all ranks are in {logs}/rank*.stack.")
    if all(row.waits for row in rows):
        lines.append("  Every rank waits for its peers: their collectives do not match, or the network is in the way.")
    return "\n".join(lines)


def _row(number: int, rank: Rank, seen: Mapping[int, Seen], now: float) -> str:
    if not rank.runs:
        return f"  rank {number}  ended with exit code {rank.exit_code or 0}"
    place = rank.place
    at = where(seen, number)
    said = f"  at {at}" if at else ""
    if rank.stopped_since_s:
        said = "  STOPPED (SIGSTOP)"
    elif _waits(seen, number):
        said += ", waiting for its peers"
    if not rank.has_posted:
        return f"  rank {number}{said}"
    return f"  rank {number}  step {place.step}  {place.phase}  for {now - place.since_s:.0f} s{said}"


def warning(ranks: Mapping[int, Rank], seen: Mapping[int, Seen], timeout_s: float, now: float) -> str:
    """What is said once of ranks that make no progress, and that nobody ends."""
    at_work = [number for number, one in sorted(seen.items()) if one.works and not one.waits]
    if not at_work and len(seen) == len(ranks) and all(one.waits for one in seen.values()):
        who = "another machine's ranks may be at work"
    elif not at_work:
        who = "no rank uses any CPU time"
    else:
        places = [f"rank {number} is at work{f' at {at}' if (at := where(seen, number)) else ''}" for number in at_work]
        who = ", ".join(places[:4]) + (f", and {len(places) - 4} more" if len(places) > 4 else "")
    lines = [f"launch: no progress for {timeout_s:g} s, but {who}. The run goes on."]
    has_posted = any(rank.has_posted for rank in ranks.values())
    waiting = [str(number) for number, one in sorted(seen.items()) if one.waits]
    if waiting:
        limit = f", and the run is ended after {PATIENCE * timeout_s:g} s without progress" if has_posted else ""
        lines.append(f"  Rank {', '.join(waiting)} waits for its peers in a collective{limit}.")
    if has_posted:
        lines.append("  Call accelerator.progress() now and then there, or put `with accelerator.pause():` around it.")
    return "\n".join(lines)


def where(seen: Mapping[int, Seen], number: int) -> str:
    """The rank's line in the script; "" where it is not known."""
    stack = seen[number].stack if number in seen else None
    return stack.where if stack is not None else ""


def _waits(seen: Mapping[int, Seen], number: int) -> bool:
    return number in seen and seen[number].waits
