"""The operating systems that shardkit runs on."""

import sys

from shardkit.errors import MachineError


def check() -> None:
    """MachineError on Windows, which lacks the file locks, signals and process groups that shardkit needs."""
    if sys.platform == "win32":
        raise MachineError("shardkit: runs on Linux and macOS (got Windows); on Windows use WSL 2, or a container.")
