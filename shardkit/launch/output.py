"""The ranks' output: everything is written to one log per rank; the screen shows complete lines prefixed by their rank.

A rank's stdout and stderr are two named pipes. One thread reads them all, so lines never mix. Progress bars (lines with
carriage returns) are shown for rank 0 only; the logs contain everything. An incomplete line is shown after a moment,
since it may be a prompt. So is the beginning of a very long line.
"""

import codecs
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
from shardkit.sizes import in_words

BAR_PERIOD_S = 10.0
"""How often a progress bar is written if the screen is a file."""
QUIET_S = 0.1
"""After how long an incomplete line is shown: programs write lines in pieces."""
POLL_S = 0.2
POLL_SOON_S = 0.05
CHUNK_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""The longest line that is kept until it is complete."""


class Lines:
    """Splits a stream of bytes into lines, each with whether it was a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[tuple[str, bool]]:
        """The lines that this piece completes."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        return [_line(line) for line in whole]

    def beginning(self) -> str | None:
        """Take the beginning of an incomplete line that is too long to keep; None if it is shorter."""
        if len(self._rest) > LONGEST_LINE_BYTES:  # of a progress bar, only the last state is kept
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        if len(self._rest) <= LONGEST_LINE_BYTES:
            return None
        text, taken = codecs.utf_8_decode(self._rest, "backslashreplace", False)
        self._rest = self._rest[taken:]
        return text

    def unfinished(self) -> tuple[str, bool] | None:
        """The incomplete line, which is kept; None if there is none. A carriage return at its end makes it a progress
        bar: that of a complete line has its newline at once."""
        return (_line(self._rest)[0], b"\r" in self._rest) if self._rest.strip() else None

    def close(self) -> list[tuple[str, bool]]:
        """The last line, if the output ended without a newline."""
        rest, self._rest = self._rest, b""
        return [_line(rest)] if rest else []


def _line(text: bytes) -> tuple[str, bool]:
    """(the text that a terminal would finally show, whether the line has carriage returns)."""
    parts = [part for part in text.split(b"\r") if part]
    return (parts[-1] if parts else b"").decode(errors="backslashreplace"), b"\r" in text.rstrip(b"\r")


@dataclass
class _Stream:
    local_rank: int
    screen: TextIO
    bar_shown_s: float
    lines: Lines = field(default_factory=Lines)
    rank: int = -1  # known after the rank has written its progress file
    read_s: float = 0.0
    shown: str = ""  # the part of the incomplete line that is on the screen


class Output:
    """Reads the ranks' pipes from `start` to `close`. Used for one start of the ranks."""

    def __init__(
        self, folder: Path, log_dir: Path, ranks_here: int, width: int, shown: frozenset[int] | None, has_prefix: bool
    ) -> None:
        self._folder, self._log_dir = folder, log_dir
        self._width, self._shown, self._has_prefix = width, shown, has_prefix
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, BinaryIO] = {}
        self._asking: _Stream | None = None  # the stream whose incomplete line is the last one on the screen
        self._bar_width = 0  # of the progress bar that is the last line on the terminal
        self._missing: dict[int, int] = {}  # {rank: bytes that are not in its log}
        self._descriptors: list[int] = []
        self._closing = threading.Event()
        for local_rank in range(ranks_here):
            for name, screen in (("out", sys.stdout), ("err", sys.stderr)):
                pipe = self._open(folder / f"{name}-{local_rank}")
                self._selector.register(pipe, selectors.EVENT_READ, _Stream(local_rank, screen, time.monotonic()))
        self._thread = threading.Thread(target=self._read, name="shardkit-output", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Read the rest of the output, and end the thread."""
        self._closing.set()
        self._thread.join()
        for log in self._logs.values():
            log.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._selector.close()
        if self._missing:
            ranks = ", ".join(map(str, sorted(self._missing)))
            lost = in_words(sum(self._missing.values()))
            self._warn(f"{lost} of output are missing in the logs in {self._log_dir} (rank {ranks}).")

    def show(self, rank: int, text: str) -> None:
        """Write text to the screen as a line of this rank."""
        self._print(sys.stderr, rank, text)

    def _open(self, path: Path) -> int:
        os.mkfifo(path, 0o600)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # Keep a writer open: otherwise the pipe signals end of file whenever no rank has it open.
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
        """Whether an incomplete line is not on the screen yet."""
        lines = [(stream, stream.lines.unfinished()) for stream in self._streams()]
        return any(line is not None and not line[1] and line[0] != stream.shown for stream, line in lines)

    def _take(self, descriptor: int, stream: _Stream) -> None:
        try:
            piece = os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return
        if stream.rank < 0:
            started = rank_files.read_progress(self._folder).values()
            stream.rank = next(one.rank for one in started if one.local_rank == stream.local_rank)
        stream.read_s = time.monotonic()
        self._keep(stream.rank, piece)
        for line in stream.lines.feed(piece):
            self._print_line(stream, *line)
        if beginning := stream.lines.beginning():
            self._print_part(stream, beginning)

    def _keep(self, rank: int, piece: bytes) -> None:
        """Append to a rank's log. If the disk is full, the run continues, and a warning says what is missing."""
        rest = memoryview(piece)
        try:
            if rank not in self._logs:
                path = log_path(self._log_dir, rank)
                self._logs[rank] = open(path, "ab", buffering=0, opener=rank_files.private)  # noqa: SIM115
            while rest:
                rest = rest[self._logs[rank].write(rest) :]
        except OSError as error:
            if not self._missing:
                self._warn(
                    f"the logs in {self._log_dir} cannot be written ({error.strerror}); the run continues without them."
                )
            self._missing[rank] = self._missing.get(rank, 0) + len(rest)

    def _warn(self, text: str) -> None:
        """Print a warning of the launcher."""
        self._end_incomplete_line()
        self._write(sys.stderr, f"warning: {text}\n")

    def _print_line(self, stream: _Stream, text: str, is_bar: bool) -> None:
        if is_bar and stream.rank != 0:
            return
        if stream is self._asking and text.startswith(stream.shown):
            self._asking = None
            self._write(stream.screen, f"{text[len(stream.shown) :]}\n")
        elif not stream.shown or text != stream.shown:  # else it was shown, before a line of another rank
            self._print(stream.screen, stream.rank, text)
        stream.shown = ""

    def _print_part(self, stream: _Stream, text: str) -> None:
        """Print the beginning of an incomplete line. The rest is appended later, unless another rank prints first."""
        if not self._is_shown(stream.rank):
            return
        if stream is self._asking:
            self._write(stream.screen, text.removeprefix(stream.shown))
        else:
            self._print(stream.screen, stream.rank, text, end="")
        self._asking, stream.shown = stream, ""

    def _show_prompt(self, stream: _Stream) -> None:
        """Print an incomplete line that has not grown for a moment. The rest is appended later."""
        line = stream.lines.unfinished()
        if line is None or line[1] or line[0] == stream.shown or time.monotonic() - stream.read_s < QUIET_S:
            return
        if not self._is_shown(stream.rank):
            return
        if stream is self._asking and line[0].startswith(stream.shown):
            self._write(stream.screen, line[0][len(stream.shown) :])
        else:
            self._print(stream.screen, stream.rank, line[0], end="")
        self._asking, stream.shown = stream, line[0]

    def _show_bar(self, stream: _Stream) -> None:
        """Print the current state of a progress bar: at once on a terminal, every BAR_PERIOD_S in a file."""
        now, line = time.monotonic(), stream.lines.unfinished() if stream.rank == 0 else None
        is_terminal = stream.screen.isatty()
        if line is None or not line[1] or now - stream.bar_shown_s < (0.1 if is_terminal else BAR_PERIOD_S):
            return
        stream.bar_shown_s = now
        self._print(stream.screen, 0, line[0], end="\r" if is_terminal else "\n")

    def _is_shown(self, rank: int) -> bool:
        return self._shown is None or rank in self._shown

    def _print(self, screen: TextIO, rank: int, text: str, end: str = "\n") -> None:
        if not self._is_shown(rank):
            return
        self._end_incomplete_line()
        prefix = f"[{rank:>{self._width}}] " if self._has_prefix else ""
        lines = [f"{prefix}{line}{end}" for line in text.split("\n")]
        if screen.isatty():
            if self._bar_width:  # its end would stay behind a shorter line
                lines.insert(0, f"{' ' * self._bar_width}\r")
            self._bar_width = len(lines[-1]) - 1 if end == "\r" else 0
        self._write(screen, "".join(lines))

    def _end_incomplete_line(self) -> None:
        if self._asking is not None:
            self._write(self._asking.screen, "\n")
            self._asking = None

    def _write(self, screen: TextIO, text: str) -> None:
        """Write to the screen; what its encoding lacks is escaped, as in the ranks' streams."""
        encoding = screen.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        with contextlib.suppress(OSError, ValueError):  # the reader of the screen may be gone
            screen.write(text)
            screen.flush()
