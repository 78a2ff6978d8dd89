"""What ranks do, as seen from outside: samples of their stacks and CPU times. What follows from these: `hangs.py`."""

import time
from collections.abc import Callable
from pathlib import Path

from shardkit.launch import processes, stacks
from shardkit.launch.hangs import Rank, Seen
from shardkit.launch.names import stack_path
from shardkit.launch.stacks import Stack

STACKS_S = 10.0
"""How long ranks have to write their stacks."""
POLL_S = 0.05
"""How often to look whether they have."""
SAMPLES = 4
"""Number of stack samples that must show a rank at the same line before it counts as not moving."""
BETWEEN_S = 1.0
"""Time between two samples."""
CPU_CHECKS = 10
"""How often per hang timeout the CPU time of the ranks is read, but at most once per second."""
WORK_SHARE = 0.005
"""A rank that uses more than this share of a core is at work. A waiting rank uses a tenth of it, to poll its store."""
WORK_S = 0.05
"""CPU seconds that a rank must use between two checks to count as at work: a few clock ticks."""


class Sampler:
    """Takes samples of the ranks that are not stopped. `has_device`: the ranks use accelerators. `wait(seconds)` pauses
    in between; where the launch is over it returns at once, and True."""

    def __init__(self, log_dir: Path, hang_timeout_s: float, has_device: bool, wait: Callable[[float], bool]) -> None:
        self._log_dir, self._has_device, self._wait = log_dir, has_device, wait
        self._cpu_period_s = max(1.0, hang_timeout_s / CPU_CHECKS)
        self._cpu_checked_s = 0.0

    def check_cpu(self, ranks: dict[int, Rank], now: float) -> None:
        """Update `worked_s` of each rank, once per period."""
        passed_s = now - self._cpu_checked_s
        if passed_s < self._cpu_period_s:
            return
        before = {number: rank.cpu_s for number, rank in ranks.items()}
        self._read_cpu(ranks, now)
        for number, rank in ranks.items():
            was = before[number]
            if was is None or rank.cpu_s is None or abs(rank.cpu_s - was) > max(WORK_S, WORK_SHARE * passed_s):
                rank.worked_s = now  # less than before means that a process which it started has ended

    def _read_cpu(self, ranks: dict[int, Rank], now: float) -> None:
        used = processes.cpu_s({rank.progress.pid for rank in ranks.values()})
        for rank in ranks.values():
            rank.cpu_s = used.get(rank.progress.pid)
        self._cpu_checked_s = now

    def are_idle(self, ranks: dict[int, Rank]) -> bool:
        """Whether none of them uses CPU time within a second; False where it is unknown."""
        pids = {rank.progress.pid for rank in _awake(ranks).values()}
        before = processes.cpu_s(pids)
        self._wait(BETWEEN_S)
        after = processes.cpu_s(pids)
        return all(pid in before.keys() & after.keys() and abs(after[pid] - before[pid]) <= WORK_S for pid in pids)

    def glance(self, ranks: dict[int, Rank], now: float) -> dict[int, Seen]:
        """What each rank does, by one sample."""
        awake = _awake(ranks)
        return self._seen(awake, [self._stacks(awake)], now)

    def look_closely(self, ranks: dict[int, Rank], now: float) -> dict[int, Seen]:
        """What each rank does, by samples over a few seconds."""
        awake = _awake(ranks)
        samples = [self._stacks(awake)]
        for _ in range(SAMPLES - 1):
            self._wait(BETWEEN_S)
            samples.append(self._stacks(awake))
        self._read_cpu(ranks, time.monotonic())  # so that CPU time of the samples does not count as work
        return self._seen(awake, samples, now)

    def _seen(self, ranks: dict[int, Rank], samples: list[dict[int, Stack]], now: float) -> dict[int, Seen]:
        return {
            number: self._seen_of(rank, [one[number] for one in samples if number in one], now)
            for number, rank in ranks.items()
        }

    def _seen_of(self, rank: Rank, found: list[Stack], now: float) -> Seen:
        moves = len({stack.frames for stack in found}) > 1
        return Seen(
            found[-1] if found else None,
            moves=moves,
            uses_cpu=now - rank.worked_s <= 2 * self._cpu_period_s,
            is_in_collective=bool(found) and all(stack.waits_for_peers for stack in found),
            waits_for_device=self._has_device and bool(found) and found[-1].is_at_device_wait and not moves,
        )

    def _stacks(self, ranks: dict[int, Rank]) -> dict[int, Stack]:
        """The current stacks of the ranks that can write them."""
        paths = {number: stack_path(self._log_dir, number) for number in ranks}
        written = {number: stacks.size(path) for number, path in paths.items()}
        asked = [number for number, rank in ranks.items() if processes.ask_for_stacks(rank.progress.pid)]
        until = time.monotonic() + STACKS_S
        while any(stacks.size(paths[number]) == written[number] for number in asked):
            if time.monotonic() > until or self._wait(POLL_S):
                break
        self._wait(2 * POLL_S)  # the last lines
        found = {number: stacks.read(path, written[number]) for number, path in paths.items()}
        return {number: stack for number, stack in found.items() if stack is not None}


def _awake(ranks: dict[int, Rank]) -> dict[int, Rank]:
    return {number: rank for number, rank in ranks.items() if not rank.stopped_since_s}
