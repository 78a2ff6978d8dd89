"""One writer per folder: a second run that saves into the same folder of checkpoints gets an error that names the
first."""

import atexit
import contextlib
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import CheckpointSaveError
from shardkit.log import get_logger

NAME = ".lock"

logger = get_logger(__name__)


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
        """Whether the locked file is still the folder's. If the folder was deleted or replaced, another run may hold
        the lock of the new one."""
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
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _key(path: Path) -> Path:
    return Path(os.path.realpath(path))


def acquire(root: Path, run_id: str, advice: str = "use another folder") -> Lock:
    """Lock a folder. The lock of a dead run is taken over.

    Raises CheckpointSaveError that names the run which holds the lock, and ends with the advice.
    """
    path = root / NAME
    key = _key(path)
    held = _held.get(key)
    if held is None:
        held = _held[key] = _Held(_locked(root, path, run_id, advice))
    elif not _is_in_place(held.descriptor, path):
        lost, held.descriptor = held.descriptor, _locked(root, path, run_id, advice)
        os.close(lost)
    held.users += 1
    return Lock(path, key)


def _is_in_place(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _locked(root: Path, path: Path, run_id: str, advice: str) -> int:
    """A locked descriptor of the lock file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    # A record lock: the system releases it when the process dies, and forked DataLoader workers do not inherit it.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = _holder(descriptor)
        os.close(descriptor)
        raise CheckpointSaveError(f"checkpoint: {root}: {_who(holder)} saves into this folder; {advice}.") from None
    except OSError as error:
        logger.warning(
            "checkpoint: %s: the file system does not support locks (%s); a second run in the folder is not detected.",
            root,
            error,
        )
        return descriptor  # the name in the file may be that of a run that goes on
    before = _holder(descriptor)
    if before and before.get("run_id") != run_id:
        logger.warning(
            "checkpoint: %s: %s ended without releasing its lock; this run takes it over.", root, _who(before)
        )
    with contextlib.suppress(OSError):  # on a full disk only the name of the holder is lost: prune makes room there
        _write(descriptor, {"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()})
    return descriptor


def _holder(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        value = json.loads(os.pread(descriptor, 4096, 0))
        return value if isinstance(value, dict) else {}
    return {}


def _who(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run"
    return f"another run (process {holder.get('pid')} on {holder.get('host')})"


def _write(descriptor: int, value: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(value).encode(), 0)
