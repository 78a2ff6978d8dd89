"""Faults on request: `SHARDKIT_FAULT=<point>:<rank>:<action>[,...]` makes a rank fail at a point of a save or load.

The test suite drives every row of docs/reference/fault-matrix.md with it, and so can anybody who wants to see a save
die. Rank `*` is every rank. Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `exit` (leave with status 0), `sleep=SECONDS`,
`raise=ERRNO` (an OSError such as ENOSPC). A fault leaves the file `<point>.<rank>` in `SHARDKIT_FAULT_MARKS`, so that
a test can prove that it fired. Unset, a point costs one look at the environment.
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
# Of a save into a store of objects there are "part" as well, where an upload has filled one, and none of those that
# belong to folders: "fsync", "sync", "rename", "sync-root", "trash".
LOAD_POINTS = ("verify", "read", "apply", "fill")


def reach(point: str, rank: int) -> None:
    """Fail here if asked to."""
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
        raise UsageError(f"{FAULT}: not a fault (got {fault!r}); write <point>:<rank>:<action>.")
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
