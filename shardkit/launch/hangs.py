"""Whether a run hangs: pure functions from the state of all ranks to a verdict. What is told of it: `hang_texts.py`.

A lack of progress alone does not end a run: a rank may compute for hours on one line. A run hangs if it makes no
progress and a rank waits for its peers in a collective, or no rank uses any CPU time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from shardkit.launch.rank_files import RankProgress
from shardkit.launch.stacks import Stack

PATIENCE = 3
"""Number of hang timeouts after which a run is ended although the rank that others wait for uses CPU time: it may be in
a slow step, or in an endless loop."""
NOTICE_S = 30.0
"""How long a run stands still until it is told that it will be ended."""


@dataclass
class Rank:
    """The state of one rank's process. `worked_s`: when it, or a process that it started, last used CPU time."""

    progress: RankProgress
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
        """Whether it reports its progress: its script has an Accelerator."""
        return self.progress.is_watched or self.progress.phase != "starting"


@dataclass(frozen=True)
class Seen:
    """What a rank did in several samples: its last stack (None if it wrote none), and what changed between them."""

    stack: Stack | None
    moves: bool = False
    """Whether its main thread was at different lines."""
    uses_cpu: bool = False
    is_in_collective: bool = False
    """Whether it was in a collective in every sample."""
    waits_for_device: bool = False
    """Whether it stays at one line that waits for an accelerator, usually at full CPU: a collective there may wait for
    a peer, or the line is slow."""

    @property
    def works(self) -> bool:
        return self.moves or self.uses_cpu

    @property
    def waits(self) -> bool:
        """Whether it is in a collective, or polls in one, and its peers do not arrive."""
        if self.stack is None:
            return False
        return (self.is_in_collective and not (self.moves and self.uses_cpu)) or (
            self.stack.is_in_backward and not self.works
        )

    @property
    def may_wait(self) -> bool:
        return self.waits or self.waits_for_device


class Verdict(Enum):
    WORK = "the run makes progress"
    SLOW = "the run may make progress; warn"
    HANG = "the run hangs"


def is_due(running: Mapping[int, Rank], timeout_s: float, now: float, has_peers: bool = True) -> bool:
    """Whether the ranks must be examined: none has made progress for `timeout_s`, or one is stopped that long.

    For a script without an Accelerator, or before it: one has used no CPU time for `timeout_s`. Ranks in
    `accelerator.pause()` are not examined. `has_peers`: the run has more ranks than one, also if the others have ended.
    """
    if any(rank.stopped_since_s and now - rank.stopped_since_s > timeout_s for rank in running.values()):
        return True
    ranks = running.values()
    if any(rank.has_posted and not rank.progress.is_watched for rank in ranks):
        return False
    if any(rank.progress.is_watched for rank in ranks):
        return min(now - rank.progress.since_s for rank in ranks) > timeout_s
    return has_peers and any(now - rank.worked_s > timeout_s for rank in ranks)


def judge(
    running: Mapping[int, Rank], seen: Mapping[int, Seen], timeout_s: float, now: float, has_others: bool = False
) -> Verdict:
    """The verdict on ranks that were examined. `has_others`: other machines have ranks, too. If all ranks here wait,
    then a rank there is at work, or hangs and is judged there."""
    if _is_debugged(seen.values()):
        return Verdict.WORK
    any_waits = any(one.may_wait for one in seen.values())
    posted = [rank.progress for rank in running.values() if rank.has_posted]
    if any(one.works and not one.waits for one in seen.values()) or (has_others and all_wait(running, seen)):
        if not posted:
            return Verdict.SLOW if any_waits else Verdict.WORK
        out_of_patience = min(now - progress.since_s for progress in posted) > PATIENCE * timeout_s
        return Verdict.HANG if any_waits and out_of_patience else Verdict.SLOW
    # A script without an Accelerator, all ranks idle: it may be a server, or wait for a file.
    return Verdict.HANG if any_waits or posted else Verdict.SLOW


def all_wait(running: Mapping[int, Rank], seen: Mapping[int, Seen]) -> bool:
    """Whether every rank was seen to wait for its peers."""
    return len(seen) == len(running) and all(one.waits for one in seen.values())


def stands_still(seen: Iterable[Seen]) -> bool:
    """Whether a rank waits for its peers and none is at work: a hang, if it stays so."""
    seen = list(seen)
    waits, works = any(one.waits for one in seen), any(one.works and not one.waits for one in seen)
    return waits and not works and not _is_debugged(seen)


def _is_debugged(seen: Iterable[Seen]) -> bool:
    return any(one.stack is not None and one.stack.is_debugged for one in seen)
