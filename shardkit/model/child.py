"""Runs a shardkit module in a separate process, isolated from side effects of the user's code."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit import env, new_process


@dataclass(frozen=True)
class EndedProcess:
    """How the process ended: its exit code (negative: signal number), and its last line on stderr."""

    code: int
    last_line: str

    @property
    def how(self) -> str:
        ended = f"was ended by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"{ended} ({self.last_line})"


def run(
    module: str, arguments: Sequence[str], folder: Path, timeout_s: float, variables: Mapping[str, str] | None = None
) -> EndedProcess | None:
    """Runs the module's `main()` in a folder; None on timeout. Output of the user's code is discarded."""
    try:
        done = subprocess.run(
            new_process.command(module, arguments),
            cwd=folder,
            env={**env.copy(), "PYTHONWARNINGS": "ignore", **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return EndedProcess(done.returncode, lines[-1] if lines else "no message")


def relative_place(place: str | None, folder: Path) -> str | None:
    """file:line, relative to the folder if it is inside."""
    if place is None:
        return None
    file, _, line = place.rpartition(":")
    try:
        return f"{Path(file).resolve().relative_to(folder.resolve())}:{line}"
    except ValueError:
        return place
