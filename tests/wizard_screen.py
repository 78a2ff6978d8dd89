"""A real terminal for tests: a program in a pseudo-terminal, and the screen that a person would see."""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pexpect
import pyte

TIMEOUT_S = 120.0


def wizard(folder: Path, *arguments: str, size: tuple[int, int] = (80, 24), **variables: str) -> "Screen":
    """`shardkit config` in a terminal of that size (columns, rows)."""
    kept = {name: os.environ[name] for name in ("PATH", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME")}
    kept |= {"PYTHONPATH": str(Path(__file__).parent.parent), "TERM": "xterm-256color", "LANG": "C.UTF-8", **variables}
    return Screen([sys.executable, "-m", "shardkit", "config", *arguments], folder, *size, kept)


class Screen:
    """`press` keys, `wait_for` text: no sleeping, so that a slow machine only takes longer. A context: the program ends
    with it."""

    def __init__(self, command: list[str], folder: Path, columns: int, rows: int, env: dict[str, str]) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=2000)
        self.stream = pyte.ByteStream(self.screen)
        with warnings.catch_warnings():
            # Newer Pythons warn of forkpty where threads live; the child starts another program at once.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.child = pexpect.spawn(
                command[0], command[1:], cwd=str(folder), env=env, dimensions=(rows, columns), timeout=TIMEOUT_S
            )
        self.raw = b""

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def lines(self) -> list[str]:
        """What is visible, without blanks at the ends."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def press(self, keys: str) -> None:
        self.child.send(keys)

    def answer(self, text: str, keys: str) -> None:
        """Waits for the text, then presses the keys."""
        self.wait_for(text)
        self.press(keys)

    def wait_for(self, text: str) -> None:
        """Until the text is on the screen; fails with the screen when it does not come."""
        end = time.monotonic() + TIMEOUT_S
        while text not in self.text:
            if time.monotonic() > end or not self._read():
                raise AssertionError(f"{text!r} did not appear on the screen:\n{self.text}")

    def wait_for_end(self) -> int:
        """Until the program ends; its exit code. Fails with the screen when it does not end."""
        end = time.monotonic() + TIMEOUT_S
        while self._read():
            if time.monotonic() > end:
                raise AssertionError(f"the program did not end; its screen:\n{self.text}")
        self._wait_and_close()
        return self.child.exitstatus if self.child.exitstatus is not None else 128 + (self.child.signalstatus or 0)

    def _read(self) -> bool:
        try:
            data = self.child.read_nonblocking(65536, timeout=1)
        except pexpect.TIMEOUT:
            return self.child.isalive()
        except pexpect.EOF:
            return False
        self.raw += data
        self.stream.feed(data)
        self._answer_queries(data)
        return True

    def _answer_queries(self, data: bytes) -> None:
        """A terminal reports its cursor position on request."""
        for _ in range(data.count(b"\x1b[6n")):
            self.child.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")

    def close(self) -> None:
        if self.child.isalive():
            self.child.kill(signal.SIGKILL)
        self._wait_and_close()

    def _wait_and_close(self) -> None:
        """pexpect waits 0.1 s for a process to end; a busy machine takes longer."""
        end = time.monotonic() + TIMEOUT_S
        while self.child.isalive() and time.monotonic() < end:
            time.sleep(0.01)
        self.child.close(force=True)
