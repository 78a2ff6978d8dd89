"""Fault injection: `SHARDKIT_FAULT=<point>:<rank>:<action>[,...]` makes a rank fail at a point of a save or load.

The tests use it for every row of docs/reference/fault-matrix.md. Rank `*` is every rank. Actions: `kill` (SIGKILL),
`stop` (SIGSTOP), `exit` (exit with status 0), `sleep=SECONDS`, `raise=ERRNO` (an OSError such as ENOSPC). Each fault
creates the file `<point>.<rank>` in the folder `SHARDKIT_FAULT_MARKS`, so that a test can check that it occurred.
Without the variable, a point costs one look-up in the environment.
"""

import errno
import os
import signal
import time
from pathlib import Path

from shardkit import env
from shardkit.errors import UsageError

FAULT = "SHARDKIT_FAULT"
MARKS = "SHARDKIT_FAULT_MARKS"

SAVE_POINTS = (
    "preflight", "temporary", "open", "write", "fsync", "close", "agree-1", "manifest", "sync", "rename",
    "sync-root", "agree-2", "latest", "retention", "trash",
)  # fmt: skip
# A save into an object store has the additional point "part", when a part of an upload is full. It has none of the
# points for folders: "fsync", "sync", "rename", "sync-root", "trash".


def reach(point: str, rank: int) -> None:
    """Fail here if SHARDKIT_FAULT requests it for this point and rank."""
    wanted = env.get(FAULT)
    if not wanted:
        return
    for fault in wanted.split(","):
        name, who, action = _parts(fault)
        if name == point and who in ("*", str(rank)):
            _mark(point, rank)
            _act(action, point)


def _parts(fault: str) -> tuple[str, str, str]:
    parts = fault.split(":")
    if len(parts) != 3:
        raise UsageError(f"{FAULT}: invalid fault (got {fault!r}); write <point>:<rank>:<action>.")
    return parts[0], parts[1], parts[2]


def _mark(point: str, rank: int) -> None:
    folder = env.get(MARKS)
    if folder is not None:
        Path(folder, f"{point}.{rank}").touch()


def _act(action: str, point: str) -> None:
    verb, _, value = action.partition("=")
    match verb:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(0)
        case "sleep":
            time.sleep(float(value))
        case "raise":
            number = getattr(errno, value)
            raise OSError(number, os.strerror(number), f"(fault injected at {point})")
        case _:
            raise UsageError(f"{FAULT}: unknown action (got {action!r}); use kill, stop, exit, sleep= or raise=.")
