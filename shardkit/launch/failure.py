"""An exception of a training script as a record: type, message, line, and whether it only reports a lost peer."""

import contextlib
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from shardkit.errors import EXIT_INTERRUPTED, ShardkitError
from shardkit.launch.rank_files import RankError

LOST_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset) by (?:remote )?peer|broken pipe|socket closed|remote process exited"
    r"|ncclremoteerror|nccl communicator was aborted|failed to recv, got 0 bytes"
    r"|connection was likely closed|timed out waiting \d+ms for"
    r"|store.*(?:closed|shut ?down)|(?:read|write) error .*peer|no response from (?:remote )?peer|peer .*is gone",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and the TCP store about a lost peer. Such an error is a consequence, not a cause."""

MISMATCH = re.compile(
    r"Rank (?P<rank>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=(?P<count>\d+)(?:, )?)?"
    r"OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\], TensorDtypes=(?P<dtype>\w+))?",
    re.IGNORECASE,
)
"""One rank's part of torch's message on mismatched collectives, with TORCH_DISTRIBUTED_DEBUG=DETAIL."""

TIMED_OUT = b"collective operation timeout"
"""What torch's watchdog of NCCL writes to the log before it aborts the process."""
LOG_END_BYTES = 1 << 16
"""How much of a log's end is searched for it: stacks of all threads may follow."""

FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)')
"""A frame in the text of a traceback."""


def own_excepthook() -> Callable[..., object]:
    """`sys.excepthook` below torch's: each start of a process group adds one, which puts the rank before each line that
    the one below prints."""
    hook: Any = sys.excepthook
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        inner = [cell.cell_contents for cell in hook.__closure__ or ()]
        hook = next((value for value in inner if callable(value)), sys.__excepthook__)
    return hook


def describe(rank: int, error: BaseException, own_files: set[str]) -> RankError:
    """The record of an exception that ended a rank. `own_files`: files of the launcher, omitted from the traceback."""
    root = root_of(error)
    shown = root if is_lost_peer(error) and not is_lost_peer(root) else error
    return RankError(
        rank=rank,
        kind=type(shown).__name__,
        message=message_of(shown),
        where=where_of(shown.__traceback__, own_files),
        traceback=render(error, own_files),
        exit_code=exit_code_of(error),
        is_lost_peer=is_lost_peer(root),
        time_s=time.monotonic(),
    )


def root_of(error: BaseException) -> BaseException:
    """The first exception of a chain: what `raise ... from` or an `except` block started with."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return error
        seen.add(id(before))
        error = before


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception only reports that another rank is gone."""
    return isinstance(error, (RuntimeError, OSError, ConnectionError)) and bool(LOST_PEER.search(text_of(error)))


def tells_of_timeout(log: Path) -> bool:
    """Whether the end of a rank's log says that a collective timed out."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END_BYTES))
        return TIMED_OUT in file.read()
    return False


def text_of(error: BaseException) -> str:
    """The error's text; Python's words for it where its own method fails."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def message_of(error: BaseException) -> str:
    """The message: all lines of shardkit's errors, the first three of others."""
    if isinstance(error, SystemExit):
        return f"the script called sys.exit({error.code!r})"
    mismatch = collectives_of(text_of(error))
    if mismatch:
        return f"the ranks are in different collectives: {mismatch}"
    lines = [line.rstrip() for line in text_of(error).strip().splitlines() if line.strip()]
    if lines[1:] and lines[1].startswith(("Original Traceback", "Traceback")):
        lines = _of_another_process(lines)
    return "\n".join(lines) if isinstance(error, ShardkitError) else "\n".join(lines[:3])[:600]


def _of_another_process(lines: list[str]) -> list[str]:
    """The message of an error that torch carried over from a worker of a data loader or of mp.spawn: where it was
    caught, the line in the user's code, and the error's own lines, which follow the indented ones of the traceback."""
    frames = [found for line in lines if (found := FRAME.fullmatch(line)) and is_users(found["file"])]
    at = f" ({short_name(frames[-1]['file'])}:{frames[-1]['line']} in {frames[-1]['name']})" if frames else ""
    end = max(number for number, line in enumerate(lines) if number == 1 or line.startswith(" "))
    first, *more = lines[end + 1 :] or [""]
    return [f"{lines[0].strip('-.: ')}{at}: {first}", *more]


def collectives_of(message: str) -> str:
    """`rank 0 in ALLREDUCE [4] Float, rank 1 in BARRIER` from torch's message on mismatched collectives; else ""."""
    parts = []
    for found in MISMATCH.finditer(message):
        of = f" [{found['shape']}] {found['dtype']}" if found["dtype"] else ""
        is_misread = found["count"] == "0" and not of  # torch reads a peer of other tensors so, with any name
        parts.append(f"rank {found['rank']} in {'another' if is_misread else found['op']}{of}")
    return ", ".join(parts) if len(parts) > 1 else ""


def exit_code_of(error: BaseException) -> int:
    """The exit code that Python would have; shardkit's errors have their own."""
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else 0 if error.code is None else 1
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, ShardkitError) else 1


def where_of(trace: TracebackType | None, own_files: set[str]) -> str:
    """`file:line in function` of the innermost frame in the user's code; "" if there is none."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename not in own_files]
    written = [frame for frame in frames if is_users(frame.filename)] or frames
    if not written:
        return ""
    frame = written[-1]
    return f"{short_name(frame.filename)}:{frame.lineno}" + ("" if frame.name == "<module>" else f" in {frame.name}")


def is_users(filename: str) -> bool:
    """Whether a file is the user's: not of an installed package, Python or shardkit."""
    path = Path(filename)
    installed = {"site-packages", "dist-packages"} & set(path.parts) or re.search(r"/lib/python3\.\d+/", filename)
    return not filename.startswith("<") and not installed and Path(__file__).parents[1] not in path.parents


def render(error: BaseException, own_files: set[str]) -> str:
    """The traceback as Python prints it, without frames of the launcher."""
    report = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = report
    seen: set[int] = set()
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        kept = [frame for frame in part.stack if frame.filename not in own_files]
        part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or part.__context__
    return "".join(report.format())


def short_name(filename: str) -> str:
    """A file's path, relative to the working folder if it is below it."""
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return filename
