"""A spinner for long work on a terminal: a line with the activity and its duration, erased at the end."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUICK_S = 0.5
"""Shorter work is not shown."""


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows `text` and the seconds on stderr while the body runs; nothing if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(text, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(text: str, done: threading.Event) -> None:
    start, told = time.monotonic(), False
    while not done.wait(0.1 if told else QUICK_S):
        told = True
        seconds = time.monotonic() - start
        mark = "|/-\\"[int(seconds * 10) % 4]
        print(f"\r{mark} {text} ... {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    if told:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
