"""What saving and loading keep over a run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.checkpoint.async_save import AsyncSave
from shardkit.checkpoint.lock import Lock
from shardkit.checkpoint.read import Unfinished
from shardkit.distributed.control import ControlGroup


@dataclass
class SaveSession:
    """Begins with the first save or load; `Run` holds it."""

    control: ControlGroup
    run_id: str
    group: Any
    background: AsyncSave | None = None
    lock: Lock | None = None
    parent: str | None = None
    last: Path | None = None
    """What this run saved last, and has loaded nothing since."""
    last_step: int | None = None
    """The newest step that this run has saved in its project."""
    unfinished: Unfinished = field(default_factory=Unfinished)
    has_warned_of_buffers: bool = False
