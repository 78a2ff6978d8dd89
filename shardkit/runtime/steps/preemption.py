"""SIGTERM, SIGUSR1 and, in a launched run, SIGINT (Ctrl-C) are remembered: the run ends at a step boundary that all
ranks agree on (`distributed/background_agreement.py`).

A scheduler may signal the launcher, one rank, or all of them: all ranks stop at the same step.
"""

import os
import signal
import threading
from functools import cache
from types import FrameType

from shardkit import env
from shardkit.launch import names, signals

_mask = threading.local()
_received: list[int] = []
_found: dict[int, object] = {}


def install() -> None:
    """Installs handlers that record these signals instead of ending the process. Main thread only; idempotent."""
    if threading.current_thread() is not threading.main_thread():
        return
    is_launched = env.get(names.LAUNCHER_PID) is not None  # else nobody ends a process that takes too long after Ctrl-C
    for number in signals.OF_RANKS:
        if number not in _found and (number != signal.SIGINT or is_launched):
            _found[number] = signal.signal(number, _remember)
    if hasattr(os, "register_at_fork"):  # not on Windows
        _spare_forked_processes()


@cache
def _spare_forked_processes() -> None:
    """Makes SIGTERM end a process that the script forks, as before: the end of a `multiprocessing.Pool` sends it to the
    workers, and waits for them. Until the process has taken the handler back, the signal waits."""
    os.register_at_fork(before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_restore_sigterm)


def _hold_sigterm() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _restore_sigterm() -> None:
    if signal.SIGTERM in _found:
        signal.signal(signal.SIGTERM, _found.pop(signal.SIGTERM))  # type: ignore[arg-type]
    _release_sigterm()


def leave_ctrl_c() -> None:
    """Lets Ctrl-C interrupt the script again: at the end of its last run, after which no step boundary looks for it.
    What schedulers send still leaves the time to finish. Main thread only."""
    is_ours = signal.getsignal(signal.SIGINT) is _remember
    if is_ours and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _found.pop(signal.SIGINT))  # type: ignore[arg-type]


def uninstall() -> None:
    """Restores the handlers found by `install`, and forgets received signals."""
    for number, handler in _found.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    _found.clear()
    _received.clear()


def is_requested_here() -> bool:
    """Whether this rank received a stop signal. Ranks may differ; see `distributed/background_agreement.py`."""
    return bool(_received)


def _remember(number: int, frame: FrameType | None) -> None:
    """Records a signal. A second one ends a process without a launcher; a launched one ignores it, because schedulers
    signal both the launcher and its ranks."""
    if _received and not env.get(names.LAUNCHER_PID):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _received.append(number)
