"""Progress of a save, load or export, for the launcher's hang detection and for the log.

work = LongWork("checkpoint: saving", moved=..., say=logger.info)
work.expect(total_bytes)        adds to the total
work(count)                     adds done bytes; without a count: only reports activity
"""

import time
from collections.abc import Callable

from shardkit import sizes

# Shorter work is finished before a line about it is read.
SILENT_S = 2.0
EVERY_S = 10.0
# A report costs some 15 microseconds, and a state has thousands of pieces.
REPORT_S = 0.1


class LongWork:
    """Counts bytes; logs the progress after two seconds, then every ten. Usable from any thread, but only one."""

    def __init__(
        self,
        what: str = "",
        moved: Callable[[], None] = lambda: None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.moved, self.say, self.clock = what, moved, say, clock
        self.total_bytes = self.done_bytes = 0
        self._begun_s = clock()
        self._next_s = self._begun_s + SILENT_S
        self._report_s = self._begun_s

    def expect(self, count: int) -> None:
        """Adds `count` bytes to the total."""
        self.total_bytes += count

    def __call__(self, count: int = 0) -> None:
        """Adds `count` bytes to those done, and reports activity, at most ten times a second."""
        self.done_bytes += count
        now = self.clock()
        if now >= self._report_s:
            self._report_s = now + REPORT_S
            self.moved()
        if self.say is not None and count and now >= self._next_s:
            self._next_s = now + EVERY_S
            self.say(self._text(now - self._begun_s))

    def _text(self, seconds: float) -> str:
        total = max(self.total_bytes, self.done_bytes)
        done, of = sizes.in_words(self.done_bytes), sizes.in_words(total)
        return f"{self.what}: {done} of {of} ({100 * self.done_bytes // max(1, total)} %), {seconds:.0f} s"
