"""One writer per folder: a second run that saves into the same folder of checkpoints gets an error that names the
first. A prune, which takes the lock while it deletes, is waited for."""

import atexit
import contextlib
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import CheckpointSaveError
from shardkit.log import get_logger

NAME = ".lock"
PRUNE = "shardkit checkpoint prune"
"""The `run_id` of a prune."""
_LOOK_EVERY_S = 0.1

log = get_logger(__name__)


@dataclass
class _Held:
    """A lock that this process holds. The system releases it as soon as any descriptor of the file is closed, so all
    runs in this process share one descriptor."""

    descriptor: int
    users: int = 0


_held: dict[Path, _Held] = {}


@dataclass
class Lock:
    """A run's use of a held lock. It ends with `release`, or with the process."""

    path: Path
    key: Path
    """Its path without links, when it was locked."""
    is_released: bool = False

    def is_in_place(self) -> bool:
        """Whether the lock still keeps others out of the folder. If the folder was deleted or replaced, another run may
        hold the lock of the new one."""
        return self.key in _held and _is_in_place(_held[self.key].descriptor, self.path)

    def release(self) -> None:
        """Allow other runs to use the folder. A second call does nothing."""
        if self.is_released:
            return
        self.is_released = True
        held = _held.get(self.key)
        if held is None:  # the process ends
            return
        held.users -= 1
        if not held.users:
            _end(self.key)


@atexit.register
def _end_all() -> None:
    """For scripts that end without releasing."""
    for path in list(_held):
        _end(path)


def _end(path: Path) -> None:
    descriptor = _held.pop(path).descriptor
    with contextlib.suppress(OSError):
        if _is_locked(descriptor):  # else it has the name of another run
            os.ftruncate(descriptor, 0)
    os.close(descriptor)


def acquire(
    root: Path,
    run_id: str,
    advice: str = "use another folder",
    prune_s: float = 0.0,
    meanwhile: Callable[[], None] = lambda: None,
) -> Lock:
    """Lock a folder. The lock of a dead run is taken over; that of a prune is waited for, `prune_s` seconds at most,
    with calls of `meanwhile`.

    Raises CheckpointSaveError that names the run which holds the lock, and ends with the advice.
    """
    path = root / NAME
    key = Path(os.path.realpath(path))
    held = _held.get(key)
    if held is None or not _is_in_place(held.descriptor, path):
        descriptor = _opened(path)
        try:
            _wait_for_prune(root, descriptor, prune_s, meanwhile)
            _lock(root, descriptor, run_id, advice)
        except BaseException:
            os.close(descriptor)
            raise
        if held is None:
            held = _held[key] = _Held(descriptor)
        else:
            os.close(held.descriptor)
            held.descriptor = descriptor
            _is_locked(descriptor)  # closing any descriptor of the file has released the lock
    held.users += 1
    return Lock(path, key)


def saver_of(root: Path) -> str | None:
    """The other run that saves into this folder now; None where none does, or it is unknown."""
    path = root / NAME
    if Path(os.path.realpath(path)) in _held:  # its lock would end with the descriptor below
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = _holder(descriptor)
        return _who(holder) if _is_locked_elsewhere(descriptor) and holder.get("run_id") != PRUNE else None
    except OSError:  # the file system does not support locks
        return None
    finally:
        os.close(descriptor)


def _is_locked_elsewhere(descriptor: int) -> bool:
    """Whether another process has the lock, without taking it. The fields of a `struct flock` differ by system."""
    whole_file, kind = (0, 0, 0), fcntl.F_WRLCK
    if sys.platform == "darwin":
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack("qqihh", *whole_file, kind, os.SEEK_SET))
        found = struct.unpack("qqihh", answer)[3]
    else:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, *whole_file))
        found = struct.unpack("hhqqi4x", answer)[0]
    return bool(found != fcntl.F_UNLCK)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError as error:
        if not (path.is_file() and os.access(path.parent, os.W_OK)):
            raise
        raise CheckpointSaveError(
            f"checkpoint: {path}: cannot be written ({error.strerror}), since a run of another user made it; delete it "
            "if none of theirs saves here, and start runs that share a folder with umask 002."
        ) from error


def _is_in_place(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path)) and _is_locked(descriptor)
    return False


def _is_locked(descriptor: int) -> bool:
    """Whether this process has the lock, which it takes again where it was lost: the system releases it when the
    process closes the file anywhere, as a script does that copies the folder. True without locks."""
    try:
        return _take(descriptor)
    except OSError:
        return True


def _take(descriptor: int) -> bool:
    """Whether this process has taken the lock, or had it. OSError where the file system does not support locks."""
    # A record lock: the system releases it when the process dies, and forked DataLoader workers do not inherit it.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _wait_for_prune(root: Path, descriptor: int, seconds: float, meanwhile: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    is_told = False
    while not _is_locked(descriptor) and _holder(descriptor).get("run_id") == PRUNE and time.monotonic() < until:
        if not is_told:
            log.info("checkpoint: %s: waits for %s, %.0f s at most.", root, _who(_holder(descriptor)), seconds)
            is_told = True
        meanwhile()
        time.sleep(_LOOK_EVERY_S)


def _lock(root: Path, descriptor: int, run_id: str, advice: str) -> None:
    try:
        is_taken = _take(descriptor)
    except OSError as error:
        log.warning(
            "checkpoint: %s: the file system does not support locks (%s); a second run in the folder is not detected.",
            root,
            error,
        )
        return  # the name in the file may be that of a run that goes on
    before = _holder(descriptor)
    if not is_taken:
        who = f"{_who(before)} {'prunes' if before.get('run_id') == PRUNE else 'saves into'}"
        raise CheckpointSaveError(f"checkpoint: {root}: {who} this folder; {advice}.")
    if before and before.get("run_id") != run_id:
        log.warning("checkpoint: %s: %s ended without releasing its lock; this run takes it over.", root, _who(before))
    with contextlib.suppress(OSError):  # on a full disk only the name of the holder is lost: prune makes room there
        _write(descriptor, {"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()})


def _holder(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        value = json.loads(os.pread(descriptor, 4096, 0))
        return value if isinstance(value, dict) else {}
    return {}


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    what = "a prune" if holder.get("run_id") == PRUNE else "another run"
    return f"{what} (process {holder.get('pid')} on {holder.get('host')})"


def _write(descriptor: int, value: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(value).encode(), 0)
