"""The ranks' output: everything into one log a rank, whole lines with their rank on the screen.

A rank's stdout and stderr come through two named pipes; one thread reads them all, so lines never mix. A progress bar
(text that returns to the start of its line) is shown for rank 0 only; the logs keep everything. A line that stays
without its end is shown as it is: it may ask for something.
"""

import contextlib
import os
import selectors
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from shardkit.launch import rank_files
from shardkit.launch.names import log_path

BAR_PERIOD_S = 10.0
"""How often a progress bar that never ends its line is written to a screen that is a file."""
QUIET_S = 0.1
"""How long a line must stay without its end to be shown: programs write lines in pieces."""
POLL_S = 0.2
POLL_SOON_S = 0.05
CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20


class Lines:
    """Bytes in any pieces in; whole lines out, each with whether it was a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[tuple[str, bool]]:
        """The lines that this piece completes."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            whole, self._rest = [*whole, self._rest], b""
        return [_line(line) for line in whole]

    def unfinished(self) -> tuple[str, bool] | None:
        """The line under way, which stays under way."""
        return _line(self._rest) if self._rest.strip() else None

    def close(self) -> list[tuple[str, bool]]:
        """The last line, where the output ended without an end of line."""
        rest, self._rest = self._rest, b""
        return [_line(rest)] if rest else []


def _line(text: bytes) -> tuple[str, bool]:
    """What a terminal would show in the end, and whether the line was written over."""
    parts = [part for part in text.split(b"\r") if part]
    return (parts[-1] if parts else b"").decode(errors="backslashreplace"), b"\r" in text.rstrip(b"\r")


@dataclass
class _Stream:
    local_rank: int
    screen: TextIO
    bar_shown_s: float
    lines: Lines = field(default_factory=Lines)
    rank: int = -1  # known once the rank has said it
    read_s: float = 0.0
    shown: str = ""  # of the line under way


class Output:
    """Reads the ranks' pipes from `start` to `close`. One for each time that the ranks are started."""

    def __init__(
        self, folder: Path, log_dir: Path, ranks_here: int, width: int, shown: frozenset[int] | None, has_prefix: bool
    ) -> None:
        self._folder, self._log_dir = folder, log_dir
        self._width, self._shown, self._has_prefix = width, shown, has_prefix
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, BinaryIO] = {}
        self._asking: _Stream | None = None  # whose line under way is the last thing on the screen
        self._descriptors: list[int] = []
        self._closing = threading.Event()
        for local_rank in range(ranks_here):
            for name, screen in (("out", sys.stdout), ("err", sys.stderr)):
                pipe = self._open(folder / f"{name}-{local_rank}")
                self._selector.register(pipe, selectors.EVENT_READ, _Stream(local_rank, screen, time.monotonic()))
        self._thread = threading.Thread(target=self._read, name="shardkit-output", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Read what is left; every line that a rank has written is then on the screen and in its log."""
        self._closing.set()
        self._thread.join()
        for log in self._logs.values():
            log.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._selector.close()

    def show(self, rank: int, text: str) -> None:
        """Write text to the screen as a line of this rank."""
        self._print(sys.stderr, rank, text)

    def _open(self, path: Path) -> int:
        os.mkfifo(path, 0o600)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # A writer of our own: else the pipe reads as ended whenever no rank has it open.
        self._descriptors += [reader, os.open(path, os.O_WRONLY)]
        return reader

    def _read(self) -> None:
        while True:
            is_last = self._closing.is_set()
            ready = self._selector.select(timeout=0 if is_last else POLL_SOON_S if self._is_pending() else POLL_S)
            for key, _ in ready:
                self._take(key.fd, key.data)
            for stream in self._streams():
                self._show_bar(stream)
                self._show_prompt(stream)
            if is_last and not ready:
                break
        for stream in self._streams():
            for line in stream.lines.close():
                self._print_line(stream, *line)

    def _streams(self) -> list[_Stream]:
        return [key.data for key in self._selector.get_map().values()]

    def _is_pending(self) -> bool:
        """Whether some line under way is not on the screen yet."""
        lines = [(stream, stream.lines.unfinished()) for stream in self._streams()]
        return any(line is not None and not line[1] and line[0] != stream.shown for stream, line in lines)

    def _take(self, descriptor: int, stream: _Stream) -> None:
        try:
            piece = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        if stream.rank < 0:
            places = rank_files.read_progress(self._folder).values()
            stream.rank = next(place.rank for place in places if place.local_rank == stream.local_rank)
        stream.read_s = time.monotonic()
        with contextlib.suppress(OSError):  # a full disk under the logs must not stop the run
            self._log(stream.rank).write(piece)
        for line in stream.lines.feed(piece):
            self._print_line(stream, *line)

    def _log(self, rank: int) -> BinaryIO:
        if rank not in self._logs:
            self._logs[rank] = open(log_path(self._log_dir, rank), "ab", buffering=0)  # noqa: SIM115
        return self._logs[rank]

    def _print_line(self, stream: _Stream, text: str, is_bar: bool) -> None:
        if is_bar and stream.rank != 0:
            return
        if stream is self._asking and text.startswith(stream.shown):
            self._asking = None
            self._write(stream.screen, f"{text[len(stream.shown) :]}\n")
        else:
            self._print(stream.screen, stream.rank, text)
        stream.shown = ""

    def _show_prompt(self, stream: _Stream) -> None:
        """A line under way that nothing has been added to for a moment; what comes later is added to it."""
        line = stream.lines.unfinished()
        if line is None or line[1] or line[0] == stream.shown or time.monotonic() - stream.read_s < QUIET_S:
            return
        if self._shown is not None and stream.rank not in self._shown:
            return
        if stream is self._asking and line[0].startswith(stream.shown):
            self._write(stream.screen, line[0][len(stream.shown) :])
        else:
            self._print(stream.screen, stream.rank, line[0], end="")
        self._asking, stream.shown = stream, line[0]

    def _show_bar(self, stream: _Stream) -> None:
        """A bar under way: at once on a terminal, now and then in a file."""
        now, line = time.monotonic(), stream.lines.unfinished() if stream.rank == 0 else None
        is_terminal = stream.screen.isatty()
        if line is None or not line[1] or now - stream.bar_shown_s < (0.1 if is_terminal else BAR_PERIOD_S):
            return
        stream.bar_shown_s = now
        self._print(stream.screen, 0, line[0], end="\r" if is_terminal else "\n")

    def _print(self, screen: TextIO, rank: int, text: str, end: str = "\n") -> None:
        if self._shown is not None and rank not in self._shown:
            return
        if self._asking is not None:  # another line is under way
            self._write(self._asking.screen, "\n")
            self._asking = None
        prefix = f"[{rank:>{self._width}}] " if self._has_prefix else ""
        self._write(screen, "".join(f"{prefix}{line}{end}" for line in text.split("\n")))

    def _write(self, screen: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader of our screen may be gone; the logs go on
            screen.write(text)
            screen.flush()
