"""What failures cost a whole run, and how often it should save.

First order in the time between failures: J. W. Young, "A first order approximation to the optimum checkpoint interval"
(https://doi.org/10.1145/361147.361115); with restarts, J. T. Daly (https://doi.org/10.1016/j.future.2004.11.016).
"""

from dataclasses import dataclass
from math import sqrt

from shardkit.digits import decimal_in
from shardkit.errors import UsageError

# 419 in 54 days on 16,384 H100s (https://arxiv.org/abs/2407.21783, section 3.3.4).
USUAL_DEVICE_HOURS = 50_000.0
# Assumptions, printed with the estimate.
RESTART_S = 600.0
MACHINE_WRITES = 1e9
"""Bytes a second, where the speed of storage is not given."""
COPIES = 10e9
"""Bytes a second from a device to host memory, for saves in the background."""


@dataclass(frozen=True)
class Saves:
    """What one save takes: `write_s`, until it is on disk; `copy_s`, until it is in host memory, from where it can be
    written beside training; `is_blocking`: whether training waits for the disk."""

    write_s: float
    copy_s: float
    is_blocking: bool

    @property
    def stall_s(self) -> float:
        """For how long training waits."""
        return self.write_s if self.is_blocking else self.copy_s


@dataclass(frozen=True)
class Failures:
    """Failures that end a run's processes, from the fastest to the slowest run, and the interval between saves that
    costs least. `lost`: the part of the time that saves, repeated steps and restarts then take; `lost_in_background`:
    the same where training does not wait for the disk."""

    expected: tuple[float, float]
    between_s: float
    save_every_s: float
    stall_s: float
    lost: float
    lost_in_background: float


def device_hours_in(text: str | None) -> float | None:
    """The hours of --mtbf; None: not given. UsageError if it is no such number."""
    hours = None if text is None else decimal_in(text)
    if text is not None and (hours is None or not 1 <= hours <= 1e9):
        raise UsageError(f"--mtbf: is not a device's hours between failures (got {text!r}); write 50000.")
    return hours


def storage_speed(text: str | None) -> float | None:
    """The bytes a second of --storage; None: not given. UsageError if it is no speed of storage."""
    speed = None if text is None else decimal_in(text)
    if text is not None and (speed is None or not 0.001 <= speed <= 1e6):
        raise UsageError(f"--storage: is not a number of GB/s from 0.001 to 1,000,000 (got {text!r}); write 100.")
    return None if speed is None else speed * 1e9


def saves(written_bytes: int, ranks: int, bytes_per_s: float, is_blocking: bool) -> Saves:
    """A save of so many bytes, of as many from each of the ranks."""
    write_s = written_bytes / bytes_per_s
    return Saves(write_s, min(write_s, written_bytes / ranks / COPIES), is_blocking)


def failures(seconds: tuple[float, float], devices: int, device_hours: float, save: Saves) -> Failures:
    """Those of a run of so many seconds, with saves at the interval that costs least."""
    between_s = device_hours * 3600 / devices
    every_s, lost = _least(save.stall_s, save.write_s, between_s)
    _, in_background = _least(save.copy_s, save.write_s, between_s)
    expected = seconds[0] / between_s, seconds[1] / between_s
    return Failures(expected, between_s, every_s, save.stall_s, lost, in_background)


def _least(stall_s: float, write_s: float, between_s: float) -> tuple[float, float]:
    """The interval between saves, none of which begins before the last is on disk, and the part of the time that is
    lost."""
    every_s = max(sqrt(2 * stall_s * between_s), write_s)
    return every_s, stall_s / every_s + (every_s / 2 + RESTART_S) / between_s
