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
from shardkit.launch import hangs, processes, rank_files, stacks
from shardkit.launch.hangs import HangRow, Rank, Seen, Verdict
from shardkit.launch.names import stack_path
from shardkit.launch.stacks import Stack
from shardkit.launch.store_client import Alarm

POLL_S = 0.05
CHECK_S = 1.0
SURVIVOR_GRACE_S = 5.0
"""How long ranks may outlive the failure of another: time to detect it and to log it."""
CTRL_C_S = 30.0
"""How long ranks have to save after Ctrl-C; at most `stop_timeout_s`."""
STACKS_S = 10.0
"""How long ranks have to write their stacks."""
TELL_S = 2.0
"""How long hanging ranks are kept alive, so that other machines can examine their ranks."""
GLANCE_S = 5.0
"""How often ranks that were told to stop are looked at."""
SAMPLES = 4
"""Number of stack samples, one second apart, that must show a rank at the same line before it counts as not moving."""
CPU_CHECKS = 10
"""How often per hang timeout the CPU time of the ranks is read, but at most once per second."""
WORK_SHARE = 0.005
"""A rank that uses more than this share of a core is at work. A waiting rank uses a tenth of it, to poll its store."""
WORK_S = 0.05
"""CPU seconds that a rank must use between two checks to count as at work: a few clock ticks."""


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
        self._has_device = has_device
        self.folder, self.log_dir, self._say, self._has_others = folder, log_dir, say, has_others
        self.hang_timeout_s, self.stop_timeout_s = hang_timeout_s, stop_timeout_s
        self.ranks: dict[int, Rank] = {}
        self.rows: list[HangRow] | None = None
        """The table rows of the ranks here, when this or another machine has found a hang."""
        self.is_hung = False
        """Whether this machine found the hang."""
        self._is_over = False
        self._kill_s = float("inf")
        self.stop: Stop | None = None
        self.killed: set[int] = set()
        self._told: dict[int, object] = {}
        """By pid; those that were told to stop."""
        self._failed_s: float | None = None
        self._started_s = time.monotonic()
        self._looked_s = 0.0
        self._cpu_checked_s = 0.0
        self._glanced_s = 0.0
        self._noticed_s = 0.0
        """When the last progress was before the standstill that was told."""
        self._warned: set[tuple[int, str]] = set()
        self._closing = threading.Event()
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
            ranks = {number: rank for number, rank in running.items() if not rank.stopped_since_s}
            rows = hangs.rows_of(self.ranks, self._all_seen(ranks, [self._stacks(ranks)], now), now)
            self._say(hangs.text_of_late_stop(rows, self.stop.timeout_s))

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
        ranks = {number: rank for number, rank in running.items() if not rank.stopped_since_s}
        if not ranks or not self._are_idle(ranks):
            return
        seen = self._look_closely(ranks, now)
        self._look()
        if all(rank.runs for rank in running.values()) and hangs.all_wait(ranks, seen):
            self._say(hangs.text_of_no_stop(hangs.rows_of(self.ranks, seen, now)))
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
        self._check_cpu(running, now)
        self._notice_standstill(running, now)
        if now - self._looked_s < self.hang_timeout_s:
            return
        if not hangs.is_due(running, self.hang_timeout_s, now, has_peers=self._has_others or len(self.ranks) > 1):
            return
        self._looked_s = now
        seen = self._look_closely(running, now)
        self._look()
        if not all(rank.runs for rank in running.values()):  # one has ended meanwhile, which is not a hang
            return
        verdict = hangs.judge(running, seen, self.hang_timeout_s, now, self._has_others)
        if self.stop is not None or self._is_over:
            return
        if verdict is Verdict.SLOW:
            self._warn(running, seen)
        elif verdict is Verdict.HANG:
            self.rows = hangs.rows_of(self.ranks, seen, now)
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
        ranks = {number: rank for number, rank in running.items() if not rank.stopped_since_s}
        if not self._are_idle(ranks):
            return
        found = self._all_seen(ranks, [self._stacks(ranks)], now)
        seen = {number: replace(one, uses_cpu=False) for number, one in found.items()}
        self._look()
        if self.stop is None and all(rank.runs for rank in running.values()) and hangs.stands_still(seen.values()):
            self._noticed_s = last
            self._say(hangs.notice_of_standstill(hangs.rows_of(self.ranks, seen, now), self.hang_timeout_s))

    def _are_idle(self, ranks: dict[int, Rank]) -> bool:
        """Whether none of them uses CPU time within a second; False where it is unknown."""
        pids = {rank.progress.pid for rank in ranks.values()}
        before = processes.cpu_s(pids)
        self._closing.wait(CHECK_S)
        after = processes.cpu_s(pids)
        return all(pid in before.keys() & after.keys() and abs(after[pid] - before[pid]) <= WORK_S for pid in pids)

    def hear_of(self, alarm: Alarm) -> None:
        """Called when ranks of another machine have failed or hang: stops the detection here. For a hang, samples the
        ranks here for the table."""
        self._is_over = True
        if alarm is Alarm.HANG and self.rows is None:
            now = time.monotonic()
            running = {n: rank for n, rank in self.ranks.items() if rank.runs and not rank.stopped_since_s}
            samples = [self._stacks(running)]
            self.rows = hangs.rows_of(self.ranks, self._all_seen(running, samples, now), now)

    def _check_cpu(self, running: dict[int, Rank], now: float) -> None:
        """Update `worked_s` of each rank, once per period."""
        passed_s = now - self._cpu_checked_s
        if passed_s < self._cpu_period_s:
            return
        before = {number: rank.cpu_s for number, rank in running.items()}
        self._read_cpu(running, now)
        for number, rank in running.items():
            was = before[number]
            if was is None or rank.cpu_s is None or abs(rank.cpu_s - was) > max(WORK_S, WORK_SHARE * passed_s):
                rank.worked_s = now  # less than before means that a process which it started has ended

    def _read_cpu(self, running: dict[int, Rank], now: float) -> None:
        used = processes.cpu_s({rank.progress.pid for rank in running.values()})
        for rank in running.values():
            rank.cpu_s = used.get(rank.progress.pid)
        self._cpu_checked_s = now

    @property
    def _cpu_period_s(self) -> float:
        return max(CHECK_S, self.hang_timeout_s / CPU_CHECKS)

    def _look_closely(self, running: dict[int, Rank], now: float) -> dict[int, Seen]:
        """Sample for a few seconds what each rank does, except stopped ones."""
        ranks = {number: rank for number, rank in running.items() if not rank.stopped_since_s}
        samples = [self._stacks(ranks)]
        for _ in range(SAMPLES - 1):
            self._closing.wait(CHECK_S)
            samples.append(self._stacks(ranks))
        self._read_cpu(running, time.monotonic())  # so that CPU time of the samples does not count as work
        return self._all_seen(ranks, samples, now)

    def _all_seen(self, ranks: dict[int, Rank], samples: list[dict[int, Stack]], now: float) -> dict[int, Seen]:
        return {number: self._seen(rank, [one.get(number) for one in samples], now) for number, rank in ranks.items()}

    def _seen(self, rank: Rank, found: list[Stack | None], now: float) -> Seen:
        known = [stack for stack in found if stack is not None]
        moves = len({stack.frames for stack in known}) > 1
        return Seen(
            known[-1] if known else None,
            moves=moves,
            uses_cpu=now - rank.worked_s <= 2 * self._cpu_period_s,
            is_in_collective=bool(known) and all(stack.waits_for_peers for stack in known),
            waits_for_device=self._has_device and bool(known) and known[-1].is_at_device_wait and not moves,
        )

    def _warn(self, running: dict[int, Rank], seen: dict[int, Seen]) -> None:
        """Warn once for each line at which ranks stay."""
        lines = {(number, hangs.where(seen, number)) for number in seen}
        if not lines <= self._warned:
            self._warned |= lines
            self._say(hangs.warning_of_slow(running, seen, self.hang_timeout_s))

    def _stacks(self, ranks: dict[int, Rank]) -> dict[int, Stack]:
        """The current stacks of the ranks that can write them."""
        paths = {number: stack_path(self.log_dir, number) for number in ranks}
        written = {number: stacks.size(path) for number, path in paths.items()}
        asked = [number for number, rank in ranks.items() if processes.ask_for_stacks(rank.progress.pid)]
        until = time.monotonic() + STACKS_S
        while any(stacks.size(paths[number]) == written[number] for number in asked):
            if time.monotonic() > until or self._closing.wait(POLL_S):
                break
        self._closing.wait(2 * POLL_S)  # the last lines
        found = {number: stacks.read(path, written[number]) for number, path in paths.items()}
        return {number: stack for number, stack in found.items() if stack is not None}


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
