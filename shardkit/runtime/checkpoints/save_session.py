"""State that saving and loading keep over a run."""

from dataclasses import dataclass, field
from typing import Any

from shardkit.checkpoint.loading.load_plan import Unfinished
from shardkit.checkpoint.saving.async_save import AsyncSave
from shardkit.checkpoint.saving.lock import Lock
from shardkit.distributed.control import ControlGroup
from shardkit.storage.url import Place


@dataclass
class SaveSession:
    """Created at the first save or load; held by `Run`."""

    control: ControlGroup
    run_id: str
    group: Any
    background: AsyncSave | None = None
    lock: Lock | None = None
    parent: str | None = None
    last: Place | None = None
    """The checkpoint that this run saved last, if nothing was loaded since."""
    last_step: int | None = None
    """The newest step that this run has saved in its project, or found there."""
    unfinished: Unfinished = field(default_factory=Unfinished)
    has_warned_of: set[str] = field(default_factory=set)
    """Kinds of differences between ranks, as `replicas.Drift` has them."""

    def release(self) -> None:
        """Lets other runs use the folder."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None
