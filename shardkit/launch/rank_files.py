"""What a rank leaves on disk for the launcher: where it is (a few bytes, renewed in place) and what it failed of.

Both live in the run's progress folder, local to the machine. Torch-free, so that a rank can write from its first line.
"""

import json
import mmap
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLACE_BYTES = 512
"""Size of a rank's place on disk; it never changes, so a reader never sees half a file."""


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is. `since_s` is CLOCK_MONOTONIC, which all processes of a machine share."""

    rank: int
    local_rank: int
    pid: int
    phase: str = "starting"
    step: int = 0
    since_s: float = 0.0
    is_watched: bool = False
    committed_step: int = -1


@dataclass(frozen=True)
class RankError:
    """What ended a rank, in its own words. `is_lost_peer`: it only noticed that another rank was gone."""

    rank: int
    kind: str
    message: str
    where: str
    traceback: str
    exit_code: int
    is_lost_peer: bool
    time_s: float


class ProgressWriter:
    """A rank's own place, mapped into memory: a post costs microseconds and no system call."""

    def __init__(self, folder: Path, rank: int, local_rank: int) -> None:
        path = progress_path(folder, rank)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, PLACE_BYTES)
            self._bytes = mmap.mmap(descriptor, PLACE_BYTES)
        finally:
            os.close(descriptor)
        self._rank, self._local_rank = rank, local_rank
        self._place: tuple[Any, ...] = ("starting", 0, time.monotonic(), False)
        self._committed = -1
        self._lock = threading.Lock()  # a save beside training tells of its end from a thread

    def post(self, phase: str, step: int, is_watched: bool = True) -> None:
        """Say where this rank is now; the launcher counts the seconds from here."""
        with self._lock:
            self._place = (phase[:64], step, time.monotonic(), is_watched)
            self._write()

    def committed(self, step: int) -> None:
        """Say that the checkpoint of a step is complete. Where the rank is stays as it was."""
        with self._lock:
            self._committed = step
            self._write()

    def _write(self) -> None:
        place = (self._rank, self._local_rank, os.getpid(), *self._place, self._committed)
        self._bytes[:] = json.dumps(place).encode().ljust(PLACE_BYTES)


def progress_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.place"


def read_progress(folder: Path) -> dict[int, RankProgress]:
    """The place of every rank that has said one, by rank."""
    found = (_read_one(path) for path in folder.glob("rank-*.place"))
    return {place.rank: place for place in found if place is not None}


def _read_one(path: Path) -> RankProgress | None:
    for _ in range(5):  # a post may fall between two halves of a read
        try:
            return RankProgress(*json.loads(path.read_bytes()))
        except (ValueError, TypeError):
            continue
        except OSError:
            return None
    return None


def write_error(folder: Path, error: RankError) -> None:
    """Put a rank's error where the launcher finds it, whole or not at all."""
    path = folder / f"rank-{error.rank}.error"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(error)))
    unfinished.replace(path)


def read_errors(folder: Path) -> dict[int, RankError]:
    """The error of every rank that wrote one, by rank."""
    errors = (RankError(**json.loads(path.read_text())) for path in folder.glob("rank-*.error"))
    return {error.rank: error for error in errors}
