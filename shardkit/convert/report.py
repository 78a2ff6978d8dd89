"""What a conversion says about every key of the file that it read."""

from dataclasses import dataclass, field
from typing import Literal

from shardkit.config.schema import Config

Verdict = Literal["kept", "changed", "left out", "refused"]
VERDICTS: list[Verdict] = ["kept", "changed", "left out", "refused"]


@dataclass(frozen=True)
class Line:
    """One key as it is written in the source, what became of it, and why."""

    key: str
    verdict: Verdict
    text: str
    place: str = ""


@dataclass(frozen=True)
class Conversion:
    """The configuration that a file of another tool means, and the account of how."""

    source: str
    config: Config
    lines: list[Line] = field(default_factory=list)

    @property
    def is_foreign(self) -> bool:
        """Whether anything had to be read as something else; a file of ours has only what is kept."""
        return any(line.verdict != "kept" for line in self.lines)

    @property
    def refused(self) -> list[Line]:
        return [line for line in self.lines if line.verdict == "refused"]


def problems(conversion: Conversion) -> list[str]:
    """What is refused, a line each, in the form of all our errors."""
    source = conversion.source
    return [
        f"{line.place or source}: {line.key}: {line.text}." if line.key else line.text for line in conversion.refused
    ]


def in_words(conversion: Conversion) -> str:
    """The account as a table in plain text, a key a line, in the order of the file."""
    width = max((len(line.key) for line in conversion.lines), default=0)
    counts = [sum(line.verdict == verdict for line in conversion.lines) for verdict in VERDICTS]
    head = ", ".join(f"{count} {verdict}" for count, verdict in zip(counts, VERDICTS, strict=True) if count)
    rows = [f"  {line.verdict:<8}  {line.key:<{width}}  {line.text}".rstrip() for line in conversion.lines]
    return "\n".join([f"from {conversion.source}: {head or 'nothing was said'}", *rows])
