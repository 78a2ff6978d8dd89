"""The report of a conversion: one line per key of the source file."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from shardkit.config.schema import Config

Verdict = Literal["kept", "changed", "left out", "refused"]
VERDICTS = get_args(Verdict)


@dataclass(frozen=True)
class Line:
    """One key of the source, the verdict, and the reason."""

    key: str
    verdict: Verdict
    text: str
    place: str = ""


@dataclass(frozen=True)
class Conversion:
    """The converted configuration, and the report."""

    source: str
    config: Config
    lines: list[Line] = field(default_factory=list)

    @property
    def is_foreign(self) -> bool:
        """Whether anything was changed or dropped; a shardkit file has only kept keys."""
        return any(line.verdict != "kept" for line in self.lines)

    @property
    def refused(self) -> list[Line]:
        return [line for line in self.lines if line.verdict == "refused"]


def problems(conversion: Conversion) -> list[str]:
    """The refused keys, one line each, in the usual form of errors."""
    source = conversion.source
    return [
        f"{line.place or source}: {line.key}: {line.text}." if line.key else line.text for line in conversion.refused
    ]


def in_words(conversion: Conversion) -> str:
    """The report as a plain-text table, one key per line, in the order of the file."""
    width = max((len(line.key) for line in conversion.lines), default=0)
    counts = [sum(line.verdict == verdict for line in conversion.lines) for verdict in VERDICTS]
    head = ", ".join(f"{count} {verdict}" for count, verdict in zip(counts, VERDICTS, strict=True) if count)
    rows = [f"  {line.verdict:<8}  {line.key:<{width}}  {line.text}".rstrip() for line in conversion.lines]
    return "\n".join([f"from {conversion.source}: {head or 'no keys'}", *rows])
