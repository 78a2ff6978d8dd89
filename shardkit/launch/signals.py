"""Signals that a command takes itself instead of ending by them."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence


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
def held() -> Iterator[None]:
    """Inside, signals that have a handler wait until its end. For starting processes: a handler that raises between a
    start and the assignment of its result would leave a process that nobody knows. Main thread only."""
    early: list[int] = []
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    with handled(
        [number for number in stopping if callable(signal.getsignal(number))],
        lambda number, frame: early.append(number),
    ):
        yield
    for number in early:
        signal.raise_signal(number)
