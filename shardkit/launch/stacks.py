"""Parses the stacks that a hanging rank wrote (in faulthandler's format): its line, and whether it waits for others."""

import linecache
import re
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

from shardkit.launch.failure import is_users, short_name

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
WAITING = ("/torch/distributed/", "/shardkit/distributed/control.py", "/shardkit/distributed/named_barrier.py")
"""Code in which a rank waits for its peers."""
OPERATORS = ("/torch/_ops.py",)
"""Code that calls an operator, such as the wait for a collective of a DTensor. Whose call it is, its caller says."""
BACKWARD = "/torch/autograd/graph.py"
"""Code that runs a backward. Without CPU time it waits for peers there: DDP's reducer is native code."""
FOR_THE_DEVICE = re.compile(r"\b(?:item|tolist|cpu|cuda|to|copy_|numpy|nonzero|float|\w*synchronize)\(")
"""A line that synchronizes with an accelerator, as copies of batches do and a backward that has filled its queue. It
runs at full CPU, as long as a collective there waits for a peer."""
DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd", "/IPython/terminal/")
"""Code of debuggers, in which a rank waits for a user."""


@dataclass(frozen=True)
class Stack:
    """The main thread's line in the user's code and its frames, and whether any thread is in a collective.

    `is_in_backward`: the main thread runs a backward, and may wait for peers. `is_debugged`: it is in a debugger.
    `is_at_device_wait`: its line synchronizes with an accelerator.
    """

    where: str
    waits_for_peers: bool
    frames: tuple[tuple[str, str, str], ...] = ()
    is_in_backward: bool = False
    is_debugged: bool = False
    is_at_device_wait: bool = False


def size(path: Path) -> int:
    """The size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read(path: Path, begin: int = 0) -> Stack | None:
    """The stacks in a file from byte `begin` on; None if the rank wrote none, for example because it is stopped."""
    try:
        text = path.read_bytes()[begin:].decode(errors="replace")
    except OSError:
        return None
    return parse(text) if "  File " in text else None


def parse(text: str) -> Stack:
    """Parse faulthandler's output, which has the innermost frame first and the main thread last."""
    threads = [_frames(block) for block in re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)]
    threads = [frames for frames in threads if frames]
    waits = any(_is_in(frames[0], WAITING) for frames in threads)
    main = threads[-1] if threads else []
    is_in_backward = bool(main) and _is_in(main[0], (BACKWARD,))
    own = next((frame for frame in main if is_users(frame[0])), None)
    return Stack(
        f"{short_name(own[0])}:{own[1]} in {own[2]}" if own else "",
        waits,
        tuple(main),
        is_in_backward,
        any(_is_in(frame, DEBUGGERS) for frame in main),
        is_in_backward or (bool(main) and FOR_THE_DEVICE.search(_line(main[0])) is not None),
    )


def _line(frame: tuple[str, str, str]) -> str:
    return linecache.getline(frame[0], int(frame[1]))


def _is_in(frame: tuple[str, str, str], places: tuple[str, ...]) -> bool:
    return any(place in frame[0].replace("\\", "/") for place in places)


def _frames(block: str) -> list[tuple[str, str, str]]:
    found = [FRAME.match(line) for line in block.splitlines()]
    frames = [(match["file"], match["line"], match["function"]) for match in found if match]
    return list(dropwhile(lambda frame: _is_in(frame, OPERATORS), frames))
