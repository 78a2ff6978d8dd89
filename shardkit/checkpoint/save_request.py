"""What a save is asked for, and what all ranks have agreed to write."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint.additions import Staging
from shardkit.checkpoint.layout import Chunk, Index
from shardkit.checkpoint.manifest import File, Manifest
from shardkit.storage.url import Place

Pieces = dict[str, list[tuple[Chunk, torch.Tensor]]]
"""What a rank writes, by section, in file order: views of its memory."""


@dataclass(frozen=True)
class SaveRequest:
    """Where and as what a state is saved."""

    final: Place
    """Where it lies: no link, as this rank sees it; or in a store of objects."""
    step: int
    run_id: str
    name: str = ""
    """As the script calls the folder: what ranks compare; by default the path."""
    epoch: int = 0
    samples_seen: int = 0
    parent: str | None = None
    replace: bool = False
    digest: str = "xxh3"
    config_text: str | None = None
    mesh: dict[str, Any] = field(default_factory=dict)
    in_series: bool = False
    """Whether this is one of a folder of step checkpoints, which has a LATEST and a retention."""
    keep_last: int = 0
    """How many of the newest stay; 0: all."""
    keep_every: int = 0
    unless_equal: bool = False
    """Whether nothing is written where the checkpoint that is there holds the same bytes. Equal on all ranks."""
    compare_buffers: bool = False
    """Whether to look for buffers that ranks hold differently. Equal on all ranks."""
    claim: Callable[[], None] = lambda: None
    """What rank 0 does before it writes anything; what it raises, all ranks raise as a CheckpointSaveError."""
    staging: Staging | None = None
    """Where the user's hooks have written what they add."""
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class PreparedSave:
    """A save that all ranks have agreed to begin: `pieces` are this rank's, by section, in file order."""

    request: SaveRequest
    index: Index
    common: dict[str, Any]
    own: dict[str, Any]
    pieces: Pieces
    temporary: Place
    """The folder that files are written into, before it is committed; in a store that one stays theirs."""
    hold: int | None
    drifted: list[str] = field(default_factory=list)
    """Buffers that ranks hold differently, where that was looked for; rank 0's are saved."""
    trouble: Exception | None = None
    """What went wrong on this rank since; the write raises it."""
    added: dict[str, File] = field(default_factory=dict)
    """On rank 0, what the user's hooks have added, once it lies in the temporary folder."""
    record: Manifest | None = None
    """On rank 0, once it is committed."""
    attempt: Any = None
    """On rank 0, of a save into a store: an `in_store.Attempt`."""
