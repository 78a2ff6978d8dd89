"""A thread of the launcher that watches the ranks: whether they have ended, are stopped, or make no progress.

It kills ranks that survive the failure of another, ranks that do not stop after a signal, and the ranks of a run that
hangs (`hangs.py`).
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardkit.errors import EXIT_PREEMPTED
from shardkit.launch import hang_texts, hangs, processes, rank_files
from shardkit.launch.hang_texts import HangRow
from shardkit.launch.hangs import Rank, Seen, Verdict
from shardkit.launch.samples import Sampler
from shardkit.launch.store_client import Alarm

POLL_S = 0.05
CHECK_S = 1.0
SURVIVOR_GRACE_S = 5.0
"""How long ranks may outlive the failure of another: time to detect it and to log it."""
CTRL_C_S = 30.0
"""How long ranks have to save after Ctrl-C; at most `stop_timeout_s`."""
TELL_S = 2.0
"""How long hanging ranks are kept alive, so that other machines can examine their ranks."""
GLANCE_S = 5.0
"""How often ranks that were told to stop are looked at."""


@dataclass
class Stop:
    """A request to end the ranks, from a signal. `is_asked_here`: a user ends this launch; else the world of an elastic
    run changes."""

    number: int
    timeout_s: float
    is_asked_here: bool = True
    since_s: float = field(default_factory=time.monotonic)


class Monitor:
    """Watches the ranks whose progress files are in `folder`, from `start` to `close`."""

    def __init__(
        self,
        folder: Path,
        log_dir: Path,
        hang_timeout_s: float,
        stop_timeout_s: float,
        say: Callable[[str], None],
        has_others: bool = False,
        has_device: bool = False,
    ) -> None:
        """`has_others`: other machines have ranks of this run. `has_device`: the ranks use accelerators."""
        self.folder, self.log_dir, self._say, self._has_others = folder, log_dir, say, has_others
        self.hang_timeout_s, self.stop_timeout_s = hang_timeout_s, stop_timeout_s
        self.ranks: dict[int, Rank] = {}
        self._started_s = time.monotonic()
        self._failed_s: float | None = None
        """When the first rank failed."""
        self.killed: set[int] = set()
        """By pid, as those that were told to stop."""
        self.stop: Stop | None = None
        self._told: dict[int, object] = {}

        self.is_hung = False
        """Whether this machine found the hang."""
        self.rows: list[HangRow] | None = None
        """The table rows of the ranks here, when this or another machine has found a hang."""
        self._is_over = False
        """Whether no hang is looked for any more."""
        self._kill_s = float("inf")
        """When ranks that hang are killed."""
        self._looked_s = self._glanced_s = 0.0
        """When they were last examined: for a hang; for a standstill, or for why they do not stop."""
        self._noticed_s = 0.0
        """When the last progress was before the standstill that was told."""
        self._warned: set[tuple[int, str]] = set()
        """Ranks that are slow, with the line at which each stays."""

        self._closing = threading.Event()
        self._sampler = Sampler(log_dir, hang_timeout_s, has_device, self._closing.wait)
        self._thread = threading.Thread(target=self._run, name="shardkit-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Update `ranks` once more, and end the thread."""
        self._closing.set()
        self._thread.join()

    def tell_to_stop(self, number: int) -> None:
        """Forward a signal to every rank; the second time, kill them. Called from a signal handler: takes no lock."""
        if self.stop is None:
            self.stop = Stop(number, self.stop_timeout_of(number))
            self._tell_all()
        elif not self.stop.is_asked_here:  # they save and leave already
            self.stop = Stop(number, self.stop.timeout_s, since_s=self.stop.since_s)
        else:
            self.kill_all()

    def stop_timeout_of(self, number: int) -> float:
        """How long ranks have to save and end after this signal, in seconds."""
        return min(CTRL_C_S, self.stop_timeout_s) if number == signal.SIGINT else self.stop_timeout_s

    def tell_to_make_way(self) -> None:
        """Let the ranks save and leave, so that another world takes over."""
        if self.stop is None:
            self.stop = Stop(signal.SIGUSR1, self.stop_timeout_s, is_asked_here=False)
            self._tell_all()

    def _tell_all(self) -> None:
        for pid in self._running_pids():
            self._tell(pid)

    def _tell(self, pid: int) -> None:
        """Sends the signal of `stop`, once: the handler and the thread may both find a rank that has just started."""
        mine = object()
        if self.stop is not None and self._told.setdefault(pid, mine) is mine:
            _send(pid, self.stop.number)

    def has_begun(self, patience_s: float) -> bool:
        """Whether every rank that came up trains with an Accelerator, which takes the signals; or has had this long."""
        phases = [rank.progress.phase for rank in self.ranks.values()]
        waited_s = time.monotonic() - self._started_s
        return bool(phases) and ("starting" not in phases or waited_s > patience_s)

    def kill_all(self) -> None:
        """Send SIGKILL to every rank that still runs."""
        for pid in self._running_pids():
            self.killed.add(pid)
            _send(pid, signal.SIGKILL)

    def _running_pids(self) -> list[int]:
        """The pids of the ranks that have started and, as far as known, still run."""
        started = rank_files.read_progress(self.folder).values()
        return [one.pid for one in started if one.rank not in self.ranks or self.ranks[one.rank].runs]

    def _run(self) -> None:
        checked_s = 0.0
        while not self._closing.wait(POLL_S):
            self._look()
            now = time.monotonic()
            if now - checked_s >= CHECK_S:
                checked_s = now
                self._kill_or_examine(now)
        self._look()

    def _look(self) -> None:
        """Update progress and exit codes."""
        for number, progress in rank_files.read_progress(self.folder).items():
            known = self.ranks.get(number)
            if known is None or known.progress.pid != progress.pid:
                self.ranks[number] = known = Rank(progress, worked_s=time.monotonic())
                self._tell(progress.pid)  # where it started after the signal was forwarded
            known.progress = progress
            if known.runs:
                self._look_at_exit(known)

    def _look_at_exit(self, rank: Rank) -> None:
        try:
            exit_code = processes.exit_code(rank.progress.pid)
        except ChildProcessError:  # the thread that started the process has already waited for it
            rank.is_gone, rank.ended_s = True, time.monotonic()
            return
        if exit_code is None:
            return
        rank.exit_code, rank.ended_s = exit_code, time.monotonic()
        if rank.exit_code not in (0, EXIT_PREEMPTED) and self._failed_s is None:
            self._failed_s = rank.ended_s

    def _kill_or_examine(self, now: float) -> None:
        """Kill the ranks if a grace period is over; else look for a hang."""
        if self._failed_s is None and any(self.folder.glob("rank-*.error")):
            self._failed_s = now
        stop_is_over = self.stop is not None and now - self.stop.since_s > self.stop.timeout_s
        grace_is_over = self._failed_s is not None and now - self._failed_s > self._grace_s()
        if stop_is_over and not self.killed:
            self._tell_who_did_not_stop(now)
        if stop_is_over or grace_is_over or now > self._kill_s:
            self.kill_all()
        elif self.stop is not None:
            self._end_who_cannot_stop(now)
        elif self._failed_s is None and not self._is_over:
            self._find_hang(now)

    def _grace_s(self) -> float:
        """A few seconds after a failure; the stop timeout in a preempted run, where ranks wait for one another."""
        preempted = any(error.exit_code == EXIT_PREEMPTED for error in rank_files.read_errors(self.folder).values())
        return self.stop_timeout_s if preempted else SURVIVOR_GRACE_S

    def _tell_who_did_not_stop(self, now: float) -> None:
        """Say where the ranks are that were told to stop, whose time is over."""
        running = self._running(now)
        if running and self.stop is not None:
            rows = hang_texts.rows_of(self.ranks, self._sampler.glance(running, now), now)
            self._say(hang_texts.text_of_late_stop(rows, self.stop.timeout_s))

    def _end_who_cannot_stop(self, now: float) -> None:
        """Kill ranks that were told to stop, where each has waited for its peers for long: none of them reaches its
        next step boundary, where it would save. Not where ranks of other machines may be at work."""
        limit_s = min(hangs.NOTICE_S, self.hang_timeout_s)
        if self._has_others or now - self._glanced_s < GLANCE_S:
            return
        running = self._running(now)
        if not hangs.is_due(running, limit_s, now, has_peers=False):
            return
        self._glanced_s = now
        awake = {number: rank for number, rank in running.items() if not rank.stopped_since_s}
        if not awake or not self._sampler.are_idle(awake):
            return
        seen = self._sampler.look_closely(awake, now)
        self._look()
        if all(rank.runs for rank in running.values()) and hangs.all_wait(awake, seen):
            self._say(hang_texts.text_of_no_stop(hang_texts.rows_of(self.ranks, seen, now)))
            self.kill_all()

    def _running(self, now: float) -> dict[int, Rank]:
        """The ranks that run; notes which of them are stopped."""
        running = {number: rank for number, rank in self.ranks.items() if rank.runs}
        for rank in running.values():
            stopped = processes.state(rank.progress.pid) in {"T", "t"}
            rank.stopped_since_s = (rank.stopped_since_s or now) if stopped else None
        return running

    def _find_hang(self, now: float) -> None:
        running = self._running(now)
        self._sampler.check_cpu(running, now)
        self._notice_standstill(running, now)
        if now - self._looked_s < self.hang_timeout_s:
            return
        if not hangs.is_due(running, self.hang_timeout_s, now, has_peers=self._has_others or len(self.ranks) > 1):
            return
        self._looked_s = now
        seen = self._sampler.look_closely(running, now)
        self._look()
        if not all(rank.runs for rank in running.values()):  # one has ended meanwhile, which is not a hang
            return
        verdict = hangs.judge(running, seen, self.hang_timeout_s, now, self._has_others)
        if self.stop is not None or self._is_over:
            return
        if verdict is Verdict.SLOW:
            self._warn(running, seen)
        elif verdict is Verdict.HANG:
            self.rows = hang_texts.rows_of(self.ranks, seen, now)
            self.is_hung = self._is_over = True
            self._kill_s = time.monotonic() + (TELL_S if self._has_others else 0.0)

    def _notice_standstill(self, running: dict[int, Rank], now: float) -> None:
        """Tell once, long before the timeout, where ranks stand that make no progress. Ranks of other machines may be
        at work: then nothing is told."""
        if self._has_others or self.hang_timeout_s < 2 * hangs.NOTICE_S or now - self._glanced_s < hangs.NOTICE_S:
            return
        last = max((rank.progress.since_s for rank in running.values()), default=now)
        if last == self._noticed_s or not hangs.is_due(running, hangs.NOTICE_S, now, has_peers=False):
            return
        self._glanced_s = now
        if not self._sampler.are_idle(running):
            return
        found = self._sampler.glance(running, now)
        seen = {number: replace(one, uses_cpu=False) for number, one in found.items()}
        self._look()
        if self.stop is None and all(rank.runs for rank in running.values()) and hangs.stands_still(seen.values()):
            self._noticed_s = last
            self._say(hang_texts.notice_of_standstill(hang_texts.rows_of(self.ranks, seen, now), self.hang_timeout_s))

    def hear_of(self, alarm: Alarm) -> None:
        """Called when ranks of another machine have failed or hang: stops the detection here. For a hang, samples the
        ranks here for the table."""
        self._is_over = True
        if alarm is Alarm.HANG and self.rows is None:
            now = time.monotonic()
            running = {number: rank for number, rank in self.ranks.items() if rank.runs}
            self.rows = hang_texts.rows_of(self.ranks, self._sampler.glance(running, now), now)

    def _warn(self, running: dict[int, Rank], seen: dict[int, Seen]) -> None:
        """Warn once for each line at which ranks stay."""
        lines = {(number, hang_texts.where(seen, number)) for number in seen}
        if not lines <= self._warned:
            self._warned |= lines
            self._say(hang_texts.warning_of_slow(running, seen, self.hang_timeout_s))


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
