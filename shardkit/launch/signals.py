"""Signals that a command takes itself instead of ending by them."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from shardkit.errors import RankFailure

ENDING = tuple(one for one in signal.Signals if one.name in {"SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"})
"""The signals with which users and schedulers end a command."""
OF_RANKS = tuple(one for one in signal.Signals if one.name in {"SIGINT", "SIGTERM", "SIGUSR1"})
"""Those after which the ranks of a run save and stop."""


def undo_of_parent() -> None:
    """Undo what the process that started this command has done to its signals. At the start of a command.

    A parent that ignores SIGCHLD (`trap '' CHLD`) takes the exit codes of ranks away, so that a failed one seems to
    have succeeded; signals that it blocks never arrive. Ignored signals other than SIGCHLD stay ignored until ranks
    run. Process 1 of a container is not ended by a signal's default action, so it gets a handler that does it.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, signal.SIGUSR2, signal.SIGCHLD})
    if os.getpid() == 1:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, frame: os._exit(128 + number))


def as_in_new_process() -> None:
    """In a rank: the actions that Python starts with, whatever the launcher or its parent has set. Without them a rank
    of a launch in the background of a shell script would ignore Ctrl-C. SIGHUP stays ignored under nohup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def end_at_once_with(code: int) -> None:
    """From here on, a signal ends this process with this exit code. Once the result is known: otherwise a Ctrl-C that
    is held, or a second SIGTERM, would replace the code of a run that has saved (75) by that of a killed one."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(code))


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Inside, these signals go to the handler; a SIGHUP that is ignored (nohup) stays so. Main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = [number for number in numbers if number != signal.SIGHUP or not is_under_nohup]
    found = {number: signal.signal(number, handler) for number in taken}
    try:
        yield
    finally:
        for number, before in found.items():
            signal.signal(number, before)


@contextlib.contextmanager
def end_it_with_an_error(
    what: str = "while no ranks ran here", numbers: Sequence[int] = tuple(set(ENDING) - {signal.SIGINT})
) -> Iterator[None]:
    """Inside, these signals (SIGTERM, SIGUSR1 and SIGHUP) raise RankFailure, so that other machines are told at once,
    and what is open is closed. For a launch without ranks."""

    def end_it(number: int, frame: object) -> None:
        raise RankFailure(f"launch: {signal.Signals(number).name} {what}.", 128 + number)

    with handled(numbers, end_it):
        yield


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Inside, signals that have a handler wait until its end. For starting processes: a handler that raises between a
    start and the assignment of its result would leave a process that nobody knows. Main thread only."""
    early: list[int] = []
    with handled(
        [number for number in ENDING if callable(signal.getsignal(number))],
        lambda number, frame: early.append(number),
    ):
        yield
    for number in early:
        signal.raise_signal(number)
