"""Unsaved answers: stored when the wizard is stopped, offered when it starts again for the same file."""

import contextlib
import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit import env
from shardkit.wording import counted


@dataclass(frozen=True)
class Draft:
    """The answers given so far for one file, and when."""

    target: str
    given: dict[str, Any]
    time_s: float

    def text(self, now_s: float) -> str:
        """`5 answers, 10 minutes ago`."""
        minutes = max(0, int(now_s - self.time_s) // 60)
        ago = f"{counted(minutes, 'minute')} ago" if minutes < 120 else f"{minutes // 60} hours ago"
        return f"{counted(len(self.given), 'answer')}, {'just now' if minutes < 1 else ago}"


def path(target: Path) -> Path:
    """The path of the draft for that file. Raises OSError where there is no home folder."""
    folder = env.users_folder("XDG_STATE_HOME", ".local/state")
    if folder is None:
        raise FileNotFoundError("there is no home folder")
    name = hashlib.sha256(os.fsencode(target.resolve())).hexdigest()[:16]
    return folder / "shardkit" / "drafts" / f"{name}.json"


def keep(target: Path, given: dict[str, Any]) -> None:
    """Stores the answers; errors are ignored, since a draft is a convenience."""
    data = {"target": str(target.resolve()), "given": given, "time_s": time.time()}
    with contextlib.suppress(OSError):
        kept = path(target)
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(".tmp")
        temporary.write_text(json.dumps(data))
        temporary.replace(kept)


def find(target: Path) -> Draft | None:
    """The draft for that file; None if there is none or it cannot be read."""
    try:
        data = json.loads(path(target).read_text())
        draft = Draft(str(data["target"]), dict(data["given"]), float(data["time_s"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if not math.isfinite(draft.time_s) or not all(map(_is_answer, draft.given.values())):
        return None
    return draft if draft.target == str(target.resolve()) and draft.given else None


def _is_answer(value: Any) -> bool:
    """Whether questions have answers of this kind; another one is from a damaged file."""
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def discard(target: Path) -> None:
    """Deletes the draft for that file."""
    with contextlib.suppress(OSError):
        path(target).unlink(missing_ok=True)
