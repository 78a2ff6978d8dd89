"""Reads the stacks that a hung rank wrote (faulthandler's form): where it is, and whether it waits for others."""

import re
from dataclasses import dataclass
from pathlib import Path

from shardkit.launch.failure import is_users, short_name

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
WAITING = ("/torch/distributed/", "/shardkit/distributed/control.py")
"""Code in which a rank waits for its peers."""


@dataclass(frozen=True)
class Stack:
    """The main thread's line in the user's code and its frames, and whether any thread is inside a collective."""

    where: str
    waits_for_peers: bool
    frames: tuple[tuple[str, str, str], ...] = ()


def size(path: Path) -> int:
    """How much has been written into a file so far."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read(path: Path, begin: int = 0) -> Stack | None:
    """The stacks in a file from a byte on; None where the rank wrote none, as one that is stopped."""
    try:
        text = path.read_bytes()[begin:].decode(errors="replace")
    except OSError:
        return None
    return parse(text) if "  File " in text else None


def parse(text: str) -> Stack:
    """From faulthandler's text: threads with their innermost frame first, the main thread last."""
    threads = [_frames(block) for block in re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)]
    threads = [frames for frames in threads if frames]
    waits = any(marker in frames[0][0].replace("\\", "/") for frames in threads for marker in WAITING)
    main = threads[-1] if threads else []
    own = next((frame for frame in main if is_users(frame[0])), None)
    return Stack(f"{short_name(own[0])}:{own[1]} in {own[2]}" if own else "", waits, tuple(main))


def _frames(block: str) -> list[tuple[str, str, str]]:
    found = [FRAME.match(line) for line in block.splitlines()]
    return [(match["file"], match["line"], match["function"]) for match in found if match]
