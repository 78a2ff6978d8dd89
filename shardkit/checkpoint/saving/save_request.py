"""The arguments of a save, and what all ranks have agreed to write."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint.files.layout import Chunk, Index
from shardkit.checkpoint.files.manifest import File, Manifest
from shardkit.checkpoint.saving.additions import Staging
from shardkit.checkpoint.states.replicas import Drift
from shardkit.storage.url import Place

Pieces = dict[str, list[tuple[Chunk, torch.Tensor]]]
"""The pieces that a rank writes, by section, in file order: views of its memory."""


@dataclass(frozen=True)
class SaveRequest:
    """Where and how a state is saved."""

    final: Place
    """The folder from the root, as this rank sees it; or a place in an object store."""
    step: int
    run_id: str
    name: str = ""
    """The folder as the script named it, for messages and the comparison between ranks; by default the path."""
    epoch: int = 0
    samples_seen: int = 0
    parent: str | None = None
    replace: bool = False
    digest: str = "xxh3"
    config_text: str | None = None
    mesh: dict[str, Any] = field(default_factory=dict)
    in_series: bool = False
    """Whether this is a step checkpoint in a folder with LATEST and retention."""
    keep_last: int = 0
    """How many of the newest are kept; 0: all."""
    keep_every: int = 0
    unless_equal: bool = False
    """Whether to write nothing if the existing checkpoint has the same contents. Equal on all ranks."""
    compare_buffers: bool = False
    """Whether to look for buffers that differ between ranks. Equal on all ranks."""
    claim: Callable[[], None] = lambda: None
    """Called on rank 0 before anything is written; if it raises, all ranks raise CheckpointSaveError."""
    staging: Staging | None = None
    """The folder with the files that the user's hooks wrote."""
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def where(self) -> str:
        """The folder, for messages."""
        return self.name or str(self.final)


@dataclass
class PreparedSave:
    """A save that all ranks have agreed to begin: `pieces` are this rank's, by section, in file order."""

    request: SaveRequest
    index: Index
    common: dict[str, Any]
    own: dict[str, Any]
    pieces: Pieces
    temporary: Place
    """The folder into which files are written, and which is renamed at the commit; in a store their final prefix."""
    hold: int | None
    drift: Drift = field(default_factory=Drift)
    packed: set[tuple[str, str]] = field(default_factory=set)
    """Section and name of parameters whose numbers are containers of packed weights."""
    nan: list[str] = field(default_factory=list)
    """Some of the weights that this rank has written and that have NaN values; see `nan.note`."""
    trouble: Exception | None = None
    """An error on this rank since then; `write_all` raises it."""
    added: dict[str, File] = field(default_factory=dict)
    """On rank 0: the files of the user's hooks, after they were moved into the temporary folder."""
    record: Manifest | None = None
    """On rank 0, after the commit."""
    attempt: Any = None
    """On rank 0, for a save into a store: an `in_store.StoreSave`."""
