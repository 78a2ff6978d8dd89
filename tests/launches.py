"""`shardkit launch` as a subprocess, for tests: to its end, or under way."""

import contextlib
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 120


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardkit", "launch", "--cpu", *arguments]


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """A launch from `folder`, to its end."""
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.py")


def folder_for(path: Path, name: object) -> Path:
    """A folder of this name below the path, made."""
    (path / str(name)).mkdir(exist_ok=True)
    return path / str(name)


def logs(folder: Path) -> Path:
    return next((folder / "runs").iterdir())


class Running:
    """A launch under way, whose output is in a file that can be waited on."""

    def __init__(self, folder: Path, *arguments: str, words: list[str] | None = None) -> None:
        """`words`: another command than a launch with these arguments."""
        self._path = folder / "screen.txt"
        with self._path.open("w") as screen:
            self.process = subprocess.Popen(
                words or command(*arguments), cwd=folder, stdin=subprocess.PIPE, stdout=screen, stderr=screen, text=True
            )

    def close(self) -> None:
        """Kill it, where it still runs."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def type(self, text: str) -> None:
        """As a person at the terminal would."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def text(self) -> str:
        return self._path.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> list[str]:
        """Everything that matches, once it has matched `count` times."""
        until = time.monotonic() + TIMEOUT_S
        while len(found := re.findall(pattern, self.text())) < count:
            assert time.monotonic() < until, f"{pattern} did not come in:\n{self.text()}"
            assert self.process.poll() is None or len(re.findall(pattern, self.text())) >= count, self.text()
            time.sleep(0.05)
        return found

    def end(self) -> int:
        return self.process.wait(timeout=TIMEOUT_S)


@contextlib.contextmanager
def running(folder: Path, *arguments: str):
    launched = Running(folder, *arguments)
    try:
        yield launched
    finally:
        launched.close()


def wait_for_files(folder: Path, *names: str) -> None:
    """Until files of these names are in the folder."""
    until = time.monotonic() + TIMEOUT_S
    while missing := [name for name in names if not (folder / name).exists()]:
        assert time.monotonic() < until, f"not there: {missing}"
        time.sleep(0.05)


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + TIMEOUT_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"still there: {alive}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> int:
    """A port below those that the kernel hands out by itself, so that nobody takes it in between. Drawn apart from
    seeds, which may be the same in two workers of pytest."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
