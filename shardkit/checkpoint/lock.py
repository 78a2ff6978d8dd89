"""One writer a folder: a second run that saves into the same folder of checkpoints is refused, by name."""

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
class Lock:
    """A held lock. It ends with `release`, or with the process."""

    path: Path
    descriptor: int

    def release(self) -> None:
        """Leave the folder to others. A second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def acquire(root: Path, run_id: str, advice: str = "use another folder") -> Lock:
    """The lock of a folder; that of a dead run is taken over.

    CheckpointSaveError names the run that holds it, and gives the advice.
    """
    path = root / NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    # A record lock: the system drops it when the process dies, and forked DataLoader workers do not inherit it.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = _holder(descriptor)
        os.close(descriptor)
        raise CheckpointSaveError(f"checkpoint: {root}: {_who(holder)} saves here; {advice}.") from None
    except OSError as error:
        logger.warning("checkpoint: %s: this file system has no locks (%s); a second run is not noticed.", root, error)
    before = _holder(descriptor)
    if before and before.get("run_id") != run_id:
        logger.warning("checkpoint: %s: %s ended without leaving; taking over.", root, _who(before))
    _write(descriptor, {"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()})
    return Lock(path, descriptor)


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
