"""Reads the stacks that a hung rank wrote (faulthandler's form): where it is, and whether it waits for others."""

import re
from dataclasses import dataclass
from pathlib import Path

from shardkit.launch.failure import is_users, short_name

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
WAITING = ("/torch/distributed/", "/shardkit/distributed/control.py", "/shardkit/distributed/named_barrier.py")
"""Code in which a rank waits for its peers."""
BACKWARD = "/torch/autograd/graph.py"
"""Code in which a rank runs a backward, and waits for its peers if it uses no CPU time: DDP's reducer is native."""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/IPython/terminal/")
"""Code in which a rank waits for a person."""


@dataclass(frozen=True)
class Stack:
    """The main thread's line in the user's code and its frames, and whether any thread is inside a collective.

    `is_in_backward`: so is the main thread, perhaps. `is_debugged`: a person has it in a debugger.
    """

    where: str
    waits_for_peers: bool
    frames: tuple[tuple[str, str, str], ...] = ()
    is_in_backward: bool = False
    is_debugged: bool = False


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
    waits = any(_is_in(frames[0], WAITING) for frames in threads)
    main = threads[-1] if threads else []
    own = next((frame for frame in main if is_users(frame[0])), None)
    return Stack(
        f"{short_name(own[0])}:{own[1]} in {own[2]}" if own else "",
        waits,
        tuple(main),
        bool(main) and _is_in(main[0], (BACKWARD,)),
        any(_is_in(frame, DEBUGGERS) for frame in main),
    )


def _is_in(frame: tuple[str, str, str], places: tuple[str, ...]) -> bool:
    return any(place in frame[0].replace("\\", "/") for place in places)


def _frames(block: str) -> list[tuple[str, str, str]]:
    found = [FRAME.match(line) for line in block.splitlines()]
    return [(match["file"], match["line"], match["function"]) for match in found if match]
