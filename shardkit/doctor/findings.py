"""One thing that was tried: what was found, and what to change. Plain values, from any rank to the reader."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from shardkit.wording import counted

OWN_FILE = "doctor-machine.json"
"""What the command has found on this machine, in the log folder, for the rank with local rank 0."""
RESULT_FILE = "doctor.json"
"""What all machines have found, in the log folder, for the command of each."""
FOLDER = "SHARDKIT_DOCTOR_FOLDER"
"""The variable that tells ranks where checkpoints and logs will be."""


class Level(IntEnum):
    """How bad it is. An ERROR is what a run would fail of."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True)
class Finding:
    """`change`: what to do about it; empty where all is well. `machine` None: it is about all of them."""

    check: str
    found: str
    level: Level = Level.OK
    change: str = ""
    machine: int | None = None


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [{**asdict(finding), "level": finding.level.name.lower()} for finding in findings]


def from_json(rows: Iterable[dict[str, Any]]) -> list[Finding]:
    return [Finding(**{**row, "level": Level[row["level"].upper()]}) for row in rows]


def has_error(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.ERROR for finding in findings)


def render(findings: Sequence[Finding], machines: int) -> str:
    """A line for each, those of one machine together, what to change below; the sum at the end."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        where = "" if machines == 1 else f"{'all' if finding.machine is None else finding.machine:>4}  "
        below = f"{'':<8} {'':<{len(where)}}{'':<{width}}  "
        first, *more = finding.found.split("\n")
        lines.append(f"{finding.level.name.lower():<8} {where}{finding.check:<{width}}  {first}")
        lines += [f"{below}{line}" for line in more]
        if finding.change:
            lines.append(f"{below}-> {finding.change}")
    return "\n".join([*lines, summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """`12 checks: 1 error, 2 warnings.`"""
    parts = []
    for level, word in ((Level.ERROR, "error"), (Level.WARNING, "warning")):
        count = sum(finding.level is level for finding in findings)
        if count:
            parts.append(counted(count, word))
    return f"{counted(len(findings), 'check')}: {', '.join(parts) or 'nothing to change'}."
