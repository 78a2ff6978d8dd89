"""What the time of a run went into, by the clocks of its ranks: a file in the log folder, and a line at the end.

record(...)    a line in time.jsonl after each start of the ranks; those of earlier launches into the folder stay
told(...)      context of a launch, at whose end its line is said
"""

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from shardkit.launch import phase_clock
from shardkit.launch.rank_files import RankProgress, private
from shardkit.wording import counted

SHOWN_FROM_S = 60.0
"""A shorter launch without a restart ends without the line."""
SHOWN_SHARE = 0.005
MUCH_DATA = 0.1
"""The share of time from which on waiting for batches is worth a remedy."""
_CALLED = {"load": "loads", "save": "saves"}


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks of this machine. All seconds are wall time."""

    launcher: tuple[str, int]
    """Its host and pid."""
    ended_utc: str
    restart: int
    ranks: int
    is_failed: bool
    wall_s: float
    spent_s: dict[str, float]
    """By kind of work (`phase_clock.KINDS`), the mean of the ranks; they add up to `wall_s`."""
    lost_s: float
    """How much of it came after the newest complete checkpoint where the attempt has failed: it is done again."""


def attempt(ranks: Collection[RankProgress], began_s: float, restart: int, is_failed: bool) -> Attempt:
    """The record of an attempt that ends now. The time before there are ranks is part of "start"."""
    now_s, total, kept_s = time.monotonic(), Counter(dict.fromkeys(phase_clock.KINDS, 0.0)), 0.0
    for rank in ranks:
        total.update(phase_clock.until(rank.spent_s, rank.phase, now_s - rank.since_s))
        kept_s += sum(rank.kept_s)
    wall_s, number = now_s - began_s, max(1, len(ranks))
    spent_s = {kind: seconds / number for kind, seconds in total.items()}
    in_ranks_s = sum(spent_s.values())
    spent_s["start"] += wall_s - in_ranks_s
    return Attempt(
        launcher=_launcher(),
        ended_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        restart=restart,
        ranks=len(ranks),
        is_failed=is_failed,
        wall_s=round(wall_s, 3),
        spent_s={kind: round(seconds, 3) for kind, seconds in spent_s.items()},
        lost_s=round(in_ranks_s - kept_s / number, 3) if is_failed else 0.0,
    )


def record(log_dir: Path, machine: int, found: Attempt, say: Callable[[str], None]) -> None:
    """Append it to the machine's file. Where that fails, says so: the script may have removed the folder, or filled the
    disk, and the result of its ranks matters more."""
    path = log_dir / (f"time-{machine}.jsonl" if machine else "time.jsonl")
    try:
        with open(path, "a", encoding="utf-8", opener=private) as file:
            file.write(json.dumps(asdict(found)) + "\n")
    except OSError as error:
        say(f"warning: {path} cannot be written ({error.strerror}); it lacks the time of this run.")


@contextmanager
def told(log_dir: Path, began_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """Says the summary of this launch, which has begun then, where all went well inside."""
    yield
    if text := summary([*_recorded(log_dir)], time.monotonic() - began_s):
        say(text)


def summary(attempts: Collection[Attempt], wall_s: float) -> str:
    """The line for the end of a launch with these attempts, which has lasted so long; "" where it is not worth one. The
    time before an attempt, as until all machines are there, is part of "start"."""
    lost_s = sum(one.lost_s for one in attempts)
    if not attempts or (wall_s < SHOWN_FROM_S and len(attempts) == 1):
        return ""
    total = {kind: sum(one.spent_s[kind] for one in attempts) for kind in phase_clock.KINDS}
    total["start"] += max(0.0, wall_s - sum(one.wall_s for one in attempts))
    wall_s, longest = sum(total.values()), sorted(total.items(), key=lambda item: -item[1])
    shares = [(seconds / wall_s, _CALLED.get(kind, kind)) for kind, seconds in longest]
    text = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= SHOWN_SHARE)
    if lost_s:
        text += f"; {lost_s / wall_s:.0%} lost to {counted(sum(one.is_failed for one in attempts), 'restart')}"
    if total["steps"] and not total["data"]:
        text += "\n  no loader was prepared, so that waits for batches are part of steps"
    if (share := total["data"] / wall_s) >= MUCH_DATA:
        text += f"\n  ranks waited for batches: more DataLoader workers (num_workers) may save up to {share:.0%}"
    return f"time: {text}"


def _launcher() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


def _recorded(log_dir: Path) -> Iterator[Attempt]:
    """Those of this launcher in the folder. A line that a crash has left unfinished is none, and one of another launch
    may be of another version."""
    for path in log_dir.glob("time*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if tuple(fields["launcher"]) == _launcher():
                yield Attempt(**{**fields, "launcher": _launcher()})
