"""A thread of the launcher that knows every rank's state: ended or not, stopped or not, how long without progress.

It ends what would otherwise stay: ranks that survive the failure of another, ranks that were told to stop and do not,
and a run in which nobody moves any more.
"""

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.errors import EXIT_PREEMPTED
from shardkit.launch import records, stacks
from shardkit.launch.names import stack_path
from shardkit.launch.records import Place
from shardkit.launch.stacks import Stack

POLL_S = 0.05
CHECK_S = 1.0
SURVIVOR_GRACE_S = 5.0
"""How long ranks may outlive the failure of another: time to notice it and to say so in their logs."""
CTRL_C_S = 30.0
"""How long ranks have to save after Ctrl-C, if `stop_timeout_s` does not say less."""
STACKS_S = 10.0
"""How long ranks have, at most, to write their stacks."""
SAMPLES = 4
"""How often, a second apart, the stacks must show a rank at the same line before it counts as standing still."""
PATIENCE = 3
"""So many hang timeouts are given to a rank that others wait for, while its stack moves: slow work, or a busy loop."""


@dataclass
class Rank:
    """What is known of one rank's process."""

    place: Place
    exit_code: int | None = None
    ended_s: float | None = None
    is_gone: bool = False
    stopped_since_s: float | None = None

    @property
    def runs(self) -> bool:
        return self.exit_code is None and not self.is_gone


@dataclass
class Hang:
    """A run in which nobody moves: who stopped first, and the table of all ranks."""

    first: int
    table: str
    all_wait: bool = False
    """Every rank is inside a collective."""


@dataclass
class Stop:
    """A wish to end the run, from a signal."""

    number: int
    timeout_s: float
    since_s: float = field(default_factory=time.monotonic)


class Watch:
    """Watches the ranks whose places are in `folder`, from `start` to `close`."""

    def __init__(self, folder: Path, log_dir: Path, hang_timeout_s: float, stop_timeout_s: float) -> None:
        self.folder, self.log_dir = folder, log_dir
        self.hang_timeout_s, self.stop_timeout_s = hang_timeout_s, stop_timeout_s
        self.ranks: dict[int, Rank] = {}
        self.hang: Hang | None = None
        self.stop: Stop | None = None
        self.killed: set[int] = set()
        self._failed_s: float | None = None
        self._moved_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Look once more and end; `ranks` stays as it is."""
        self._closing.set()
        self._thread.join()

    def tell_to_stop(self, number: int) -> None:
        """Hand a signal to every rank; the second time, end them all. Called from a signal handler: takes no lock."""
        if self.stop is None:
            is_ctrl_c = number == signal.SIGINT
            self.stop = Stop(number, min(CTRL_C_S, self.stop_timeout_s) if is_ctrl_c else self.stop_timeout_s)
            for pid in self._running_pids():
                _send(pid, number)
        else:
            self.kill_all()

    def kill_all(self) -> None:
        """SIGKILL to every rank that still runs."""
        for pid in self._running_pids():
            self.killed.add(pid)
            _send(pid, signal.SIGKILL)

    def _running_pids(self) -> list[int]:
        """The processes of the ranks that have come up and, as far as is known, still run."""
        places = records.read_places(self.folder).values()
        return [place.pid for place in places if place.rank not in self.ranks or self.ranks[place.rank].runs]

    def _run(self) -> None:
        checked_s = 0.0
        while not self._closing.wait(POLL_S):
            self._look()
            now = time.monotonic()
            if now - checked_s >= CHECK_S:
                checked_s = now
                self._end_what_stays(now)
        self._look()

    def _look(self) -> None:
        """Renew places and exit codes."""
        for number, place in records.read_places(self.folder).items():
            known = self.ranks.get(number)
            if known is None or known.place.pid != place.pid:
                self.ranks[number] = known = Rank(place)
                if self.stop is not None:  # it came up after the signal had gone round
                    _send(place.pid, self.stop.number)
            known.place = place
            if known.runs:
                self._look_at_exit(known)

    def _look_at_exit(self, rank: Rank) -> None:
        try:
            # WNOWAIT leaves the process to the thread that started it.
            status = os.waitid(os.P_PID, rank.place.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # that thread has taken it already
            rank.is_gone, rank.ended_s = True, time.monotonic()
            return
        if status is None:
            return
        rank.ended_s = time.monotonic()
        rank.exit_code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        if rank.exit_code not in (0, EXIT_PREEMPTED) and self._failed_s is None:
            self._failed_s = rank.ended_s

    def _end_what_stays(self, now: float) -> None:
        if self._failed_s is None and any(self.folder.glob("rank-*.error")):
            self._failed_s = now
        stop_is_over = self.stop is not None and now - self.stop.since_s > self.stop.timeout_s
        grace_is_over = self._failed_s is not None and now - self._failed_s > self._grace_s()
        if stop_is_over or grace_is_over:
            self.kill_all()
        elif self.stop is None and self._failed_s is None and self.hang is None:
            self._find_hang(now)

    def _grace_s(self) -> float:
        """After a failure a few seconds; a preempted run's ranks wait for one another as long as a stop may take."""
        preempted = any(error.exit_code == EXIT_PREEMPTED for error in records.read_errors(self.folder).values())
        return self.stop_timeout_s if preempted else SURVIVOR_GRACE_S

    def _find_hang(self, now: float) -> None:
        running = {number: rank for number, rank in self.ranks.items() if rank.runs}
        for rank in running.values():
            stopped = process_state(rank.place.pid) in {"T", "t"}
            rank.stopped_since_s = (rank.stopped_since_s or now) if stopped else None
        if now - self._moved_s < self.hang_timeout_s or not is_hung(running, self.hang_timeout_s, now):
            return
        found, moved = self._samples({n: rank for n, rank in running.items() if not rank.stopped_since_s})
        if moved and not (waits_in_vain(found) and is_hung(running, PATIENCE * self.hang_timeout_s, now)):
            self._moved_s = now
            return
        all_wait = len(found) == len(running) and all(stack.waits_for_peers for stack in found.values())
        self.hang = Hang(first_to_stop(self.ranks, found), render_table(self.ranks, found, now), all_wait)
        self.kill_all()

    def _samples(self, ranks: dict[int, Rank]) -> tuple[dict[int, Stack], bool]:
        """The ranks' stacks, and whether some rank has moved meanwhile: it is at work, and only posts no progress."""
        first = self._stacks(ranks)
        for _ in range(SAMPLES - 1):
            self._closing.wait(CHECK_S)
            if somebody_moved(first, self._stacks(ranks)):
                return first, True
        return first, False

    def _stacks(self, ranks: dict[int, Rank]) -> dict[int, Stack]:
        """What the ranks' threads do now; without those that do not say."""
        paths = {number: stack_path(self.log_dir, number) for number in ranks}
        written = {number: stacks.size(path) for number, path in paths.items()}
        for rank in ranks.values():
            _send(rank.place.pid, signal.SIGUSR2)
        until = time.monotonic() + STACKS_S
        while any(stacks.size(path) == written[number] for number, path in paths.items()):
            if time.monotonic() > until or self._closing.wait(POLL_S):
                break
        self._closing.wait(2 * POLL_S)  # the last lines
        found = {number: stacks.read(path, written[number]) for number, path in paths.items()}
        return {number: stack for number, stack in found.items() if stack is not None}


def is_hung(running: dict[int, Rank], timeout_s: float, now: float) -> bool:
    """Whether no rank has moved for `timeout_s`, or one has been stopped from outside for so long.

    A rank in a slow step is no hang while another still posts. Ranks that never post are not judged by their age, and
    one that has paused may take any time.
    """
    stopped_s = [now - rank.stopped_since_s for rank in running.values() if rank.stopped_since_s]
    if max(stopped_s, default=0.0) > timeout_s:
        return True
    places = [rank.place for rank in running.values()]
    has_paused = any(not place.is_watched and place.phase != "starting" for place in places)
    if has_paused or not any(place.is_watched for place in places):
        return False
    return min(now - place.since_s for place in places) > timeout_s


def somebody_moved(before: dict[int, Stack], after: dict[int, Stack]) -> bool:
    """Whether some rank's main thread is elsewhere than it was."""
    return any(number in before and before[number].frames != stack.frames for number, stack in after.items())


def waits_in_vain(found: dict[int, Stack]) -> bool:
    """Whether some rank waits in a collective for others that are not there."""
    return len({stack.waits_for_peers for stack in found.values()}) == 2


def first_to_stop(ranks: dict[int, Rank], found: dict[int, Stack]) -> int:
    """The rank that the others wait for: one that left, one stopped from outside, one not inside a collective.

    Among equals the one that is furthest behind.
    """

    def order(number: int) -> tuple[object, ...]:
        rank, stack = ranks[number], found.get(number)
        waits = stack is not None and stack.waits_for_peers
        return (rank.runs and not rank.stopped_since_s, waits, rank.place.step, rank.place.since_s)

    return min(ranks, key=order)


def render_table(ranks: dict[int, Rank], found: dict[int, Stack], now: float) -> str:
    """One line a rank: step, phase, seconds since it last moved, and the line of the script that it is at."""
    return "\n".join(_row(number, ranks[number], found.get(number), now) for number in sorted(ranks))


def _row(number: int, rank: Rank, stack: Stack | None, now: float) -> str:
    if not rank.runs:
        return f"  rank {number}  ended with exit code {rank.exit_code or 0}"
    where = f"  at {stack.where}" if stack is not None and stack.where else ""
    if rank.stopped_since_s:
        where = "  STOPPED (SIGSTOP)"
    elif stack is not None and stack.waits_for_peers:
        where += ", waiting for its peers"
    since = f"for {now - rank.place.since_s:.0f} s"
    return f"  rank {number}  step {rank.place.step}  {rank.place.phase}  {since}{where}"


def process_state(pid: int) -> str:
    """The letter of /proc: R running, S waiting, D disk, T stopped, Z ended; "" where it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
