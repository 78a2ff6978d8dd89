"""A rank's process: its exit code, its state, the CPU time of all processes that it started, and a request for its
stacks. State and CPU time are only known on Linux.
"""

import _thread
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

PROC = Path("/proc")
STACKS_THREAD = "shardkit-stacks"
"""The thread of a rank that receives the signal for its stacks (15 characters, the limit of the kernel)."""
STACKS_SIGNAL = signal.SIGUSR2


def exit_code(pid: int) -> int | None:
    """The exit code of a child, minus the signal that ended it; None while it runs. ChildProcessError where it has been
    waited for, which this leaves to others."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: known only once it has been waited for
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            raise ChildProcessError(pid) from None
        return None
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def state(pid: int) -> str:
    """The state letter in /proc: R running, S sleeping, D disk, T stopped, Z zombie; "" if unknown."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def cpu_s(sessions: Collection[int]) -> dict[int, float]:
    """{session id: CPU seconds of its processes}. A rank is a session leader, so its session has all processes that it
    started. Unknown sessions are omitted."""
    used: dict[int, float] = {}
    for name in os.listdir(PROC) if sys.platform.startswith("linux") else ():
        fields = _stat(int(name)) if name.isdigit() else None
        if fields and int(fields[3]) in sessions:
            ticks = sum(map(int, fields[11:15]))  # user and system time, of it and of children that it has waited for
            used[int(fields[3])] = used.get(int(fields[3]), 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return used


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third one (the state) on. The second is the process's name, cut at 15
    bytes, maybe inside a letter."""
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def take_stack_signals() -> None:
    """In a rank: start a thread that receives the signals of `ask_for_stacks`, so that they do not interrupt system
    calls of the main thread.

    It is not a `threading.Thread`, so a script that counts its threads does not see it.
    """
    if not sys.platform.startswith("linux"):
        return
    named, for_ever = _thread.allocate_lock(), _thread.allocate_lock()
    named.acquire()
    for_ever.acquire()
    _thread.start_new_thread(_wait, (named, for_ever))
    named.acquire()


def _wait(named: _thread.LockType, for_ever: _thread.LockType) -> None:
    with contextlib.suppress(OSError):
        (PROC / "self" / "task" / str(_thread.get_native_id()) / "comm").write_text(STACKS_THREAD)
    named.release()
    for_ever.acquire()


def ask_for_stacks(pid: int) -> bool:
    """Make a rank write its stacks. Returns False if it cannot, such as after it called exec."""
    if not sys.platform.startswith("linux"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            return True
    thread = _stacks_thread(pid)
    return thread is not None and ctypes.CDLL(None).tgkill(pid, thread, STACKS_SIGNAL) == 0


def _stacks_thread(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            if (task / "comm").read_text(errors="replace").strip() == STACKS_THREAD:
                return int(task.name)
    return None
