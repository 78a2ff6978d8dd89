"""Records which names of Accelerate a run uses, and from which packages, for the report at the end of a launch."""

import sys
from dataclasses import dataclass, field
from types import FrameType

from shardkit.compat.differences import Difference, affecting, taken_back
from shardkit.wording import first_few


@dataclass
class Touched:
    """The record of one process: {dotted name (`utils.set_seed`, `Accelerator.prepare`): packages that use it}."""

    is_on: bool = False
    stood_in: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, set[str]] = field(default_factory=dict)
    missing: dict[str, set[str]] = field(default_factory=dict)

    def note(self, kind: dict[str, set[str]], name: str, frame: FrameType | None) -> None:
        """Record the use of a name by the code in `frame`. Uses by shardkit are ignored."""
        if not self.is_on:
            return
        while frame is not None and _root(frame).startswith("importlib"):
            frame = frame.f_back
        if frame is not None and (who := _root(frame)) != "shardkit":
            kind.setdefault(name, set()).add(who)

    @property
    def is_anything(self) -> bool:
        """Whether any name was used."""
        return bool(self.stood_in or self.refused or self.missing)

    def differing(self) -> list[Difference]:
        """The differences in behavior of the names used, as this run was started."""
        return affecting({*self.stood_in, *self.refused}, taken_back())


def _root(frame: FrameType) -> str:
    name = str(frame.f_globals.get("__name__", ""))
    return "script" if name == "__main__" else name.split(".")[0].removeprefix("_frozen_")


TOUCHED = Touched()


def note_member(name: str) -> None:
    """Record that code outside of shardkit uses a member of the Accelerator: the caller of this function's caller."""
    if TOUCHED.is_on and not name.startswith("__"):
        TOUCHED.note(TOUCHED.stood_in, f"Accelerator.{name}", sys._getframe(2))


def note_scheduler() -> None:
    """Record that a scheduler was prepared on several ranks, so that the report has the difference in its steps."""
    if TOUCHED.is_on:
        TOUCHED.stood_in.setdefault("Accelerator.prepare_scheduler", set()).add("script")


def report(touched: Touched, limit: int | None = 12) -> str:
    """The report, with at most `limit` names per line, and all differences in behavior."""
    lines = ["accelerate is replaced by shardkit.compat in this run:"]
    lines += _lines("used", touched.stood_in, limit)
    lines += _lines("imported, but an error if it is called", touched.refused, limit)
    lines += _lines("unknown names", touched.missing, limit)
    lines += [f"  differs: {one.text}" for one in touched.differing()]
    return "\n".join(lines)


def _lines(title: str, found: dict[str, set[str]], limit: int | None) -> list[str]:
    lines = []
    for user in sorted({user for users in found.values() for user in users}, key=lambda user: (user != "script", user)):
        names = sorted(name for name, users in found.items() if user in users)
        lines.append(f"  {title}, by {user}: {first_few(names, len(names) if limit is None else limit)}")
    return lines
