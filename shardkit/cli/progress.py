"""Progress output for commands that read many bytes."""

import sys
import time
from collections.abc import Callable

from shardkit import sizes


class Progress:
    """Prints progress in bytes to stderr, from two seconds after the start."""

    def __init__(self, verb: str, total_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.verb, self.total, self.done = verb, total_bytes, 0
        self.clock, self.next_s = clock, clock() + 2.0
        self.shown = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)

    def add(self, count: int) -> None:
        """Add the bytes that were just processed."""
        self.done += count
        now = self.clock()
        if now < self.next_s:
            return
        on_screen = sys.stderr.isatty()
        self.next_s, self.shown = now + (0.5 if on_screen else 10.0), True
        text = f"{self.verb} {sizes.in_words(min(self.done, self.total))} of {sizes.in_words(self.total)}"
        print(f"\r{text}" if on_screen else text, end="" if on_screen else "\n", file=sys.stderr, flush=True)
