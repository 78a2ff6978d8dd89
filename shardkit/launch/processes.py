"""What the system tells of a rank's process: its state, the CPU time of all that it has started, and how to ask it for
its stacks. Elsewhere than on Linux no state and no CPU time is known.
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
"""The thread of a rank that takes the signal for its stacks (15 characters, as many as the kernel keeps)."""
STACKS_SIGNAL = signal.SIGUSR2


def state(pid: int) -> str:
    """The letter of /proc: R running, S waiting, D disk, T stopped, Z ended; "" where it is not known."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def cpu_s(sessions: Collection[int]) -> dict[int, float]:
    """CPU seconds that each session's living processes have used: a rank leads one, with all that it has started.

    Without those of which nothing is known.
    """
    used: dict[int, float] = {}
    for name in os.listdir(PROC) if sys.platform.startswith("linux") else ():
        fields = _stat(int(name)) if name.isdigit() else None
        if fields and int(fields[3]) in sessions:
            ticks = sum(map(int, fields[11:15]))  # user and system, its own and that of children it has waited for
            used[int(fields[3])] = used.get(int(fields[3]), 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    return used


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third one on: the state."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def take_stack_signals() -> None:
    """In a rank: a thread that only waits, for `ask_for_stacks`. The main thread's system calls go on undisturbed.

    It is none of `threading`'s, so a script that counts its threads does not see it.
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
    """Make a rank write its stacks; whether it could be asked: one that has become another program cannot be."""
    if not sys.platform.startswith("linux"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
            return True
    thread = _stacks_thread(pid)
    return thread is not None and ctypes.CDLL(None).tgkill(pid, thread, STACKS_SIGNAL) == 0


def _stacks_thread(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            if (task / "comm").read_text().strip() == STACKS_THREAD:
                return int(task.name)
    return None
