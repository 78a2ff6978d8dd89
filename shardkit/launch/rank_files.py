"""Files that a rank writes for the launcher: its progress (a few bytes, updated in place) and its error.

Both are in the run's progress folder, local to the machine. Torch-free, so that a rank can write them from its start.
"""

import json
import mmap
import os
import struct
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from shardkit.launch.phase_clock import KINDS, PhaseClock

_PRESENT = struct.Struct("=iii256sqd?q?")
_TIMES = struct.Struct(f"={len(KINDS)}d")
_PROGRESS_BYTES = _PRESENT.size + 2 * _TIMES.size
"""The fields of RankProgress in its file, whose size never changes: a reader never sees a truncated one."""


@dataclass(frozen=True)
class RankProgress:
    """The progress of a rank. `since_s` is CLOCK_MONOTONIC, which all processes of a machine share; `is_configured`:
    the script has taken the run's configuration, as by an Accelerator."""

    rank: int
    local_rank: int
    pid: int
    phase: str = "starting"
    step: int = 0
    since_s: float = 0.0
    is_watched: bool = False
    committed_step: int = -1
    is_configured: bool = False
    spent_s: tuple[float, ...] = (0.0,) * len(KINDS)
    """By kind of work, up to the present phase's beginning."""
    kept_s: tuple[float, ...] = (0.0,) * len(KINDS)
    """Of these, what came before the newest complete checkpoint."""


@dataclass(frozen=True)
class RankError:
    """The error that ended a rank. `is_lost_peer`: it only reports that another rank is gone."""

    rank: int
    kind: str
    message: str
    where: str
    traceback: str
    exit_code: int
    is_lost_peer: bool
    time_s: float


class ProgressWriter:
    """A rank's progress file, mapped into memory: an update takes microseconds and no system call."""

    def __init__(self, folder: Path, rank: int, local_rank: int) -> None:
        path = progress_path(folder, rank)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            reserve(descriptor, _PROGRESS_BYTES)
            self._bytes = mmap.mmap(descriptor, _PROGRESS_BYTES)
        finally:
            os.close(descriptor)
        self._rank, self._local_rank = rank, local_rank
        began_s = time.monotonic()
        self._present = (b"starting", 0, began_s, False)
        self._clock = PhaseClock(began_s)
        self._committed = -1
        self._is_configured = False
        self._lock = threading.Lock()  # a background save reports its commit from a thread

    @property
    def phase(self) -> str:
        return self._present[0].decode(errors="replace")

    def post(self, phase: str, step: int | None, is_watched: bool = True) -> None:
        """Set phase and step (None: as it is). The time without progress is counted from this call."""
        with self._lock:
            step = self._present[1] if step is None else step
            name, now_s = phase[:64].encode(errors="replace"), time.monotonic()  # maybe 64 emoji, of four bytes each
            self._present = (name, step, now_s, is_watched)
            self._clock.enter(phase, step, now_s)
            self._write()

    def committed(self, step: int) -> None:
        """Set the step of the newest committed checkpoint. Phase and step stay unchanged."""
        with self._lock:
            self._committed = step
            self._clock.committed(step)
            self._bytes[-_TIMES.size :] = _TIMES.pack(*self._clock.kept)
            self._write()

    def configured(self) -> None:
        """The script has taken the run's configuration. Phase and step stay unchanged."""
        with self._lock:
            self._is_configured = True
            self._write()

    def _write(self) -> None:
        who = (self._rank, self._local_rank, os.getpid())
        present = _PRESENT.pack(*who, *self._present, self._committed, self._is_configured)
        self._bytes[: -_TIMES.size] = present + _TIMES.pack(*self._clock.spent)


def private(path: str, flags: int) -> int:
    """An opener for open(..., opener=private): new files are readable and writable by their owner only."""
    return os.open(path, flags, 0o600)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Allocate the file's blocks: writing to a mapped page without disk space would raise SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:  # macOS
        os.ftruncate(descriptor, size_bytes)


def progress_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.progress"


def read_progress(folder: Path) -> dict[int, RankProgress]:
    """{rank: its progress} of all ranks that have written one."""
    found = (_read_one(path) for path in folder.glob("rank-*.progress"))
    return {one.rank: one for one in found if one is not None}


def _read_one(path: Path) -> RankProgress | None:
    """None while nothing has been written."""
    for _ in range(5):  # the file may be updated while it is read
        try:
            record = path.read_bytes()
            if record != path.read_bytes():
                continue
            rank, local_rank, pid, phase, *rest = _PRESENT.unpack_from(record)
            times = (_TIMES.unpack_from(record, _PRESENT.size), _TIMES.unpack_from(record, _PRESENT.size + _TIMES.size))
        except (OSError, struct.error):  # struct.error: it is being created
            return None
        values = (rank, local_rank, pid, phase.rstrip(b"\0").decode(errors="replace"), *rest, *times)
        return RankProgress(*values) if pid else None
    return None


def write_error(folder: Path, error: RankError) -> None:
    """Write a rank's error for the launcher, atomically."""
    path = folder / f"rank-{error.rank}.error"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(error)))
    unfinished.replace(path)


def read_errors(folder: Path) -> dict[int, RankError]:
    """{rank: its error} of all ranks that have written one."""
    errors = (RankError(**json.loads(path.read_text())) for path in folder.glob("rank-*.error"))
    return {error.rank: error for error in errors}
