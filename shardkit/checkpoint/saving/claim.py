"""One run per folder of checkpoints, also one after another: what other runs have saved there since this run began.

While a run saves into a folder on a disk, a lock keeps others out (`lock.py`); an object store has none. Neither tells
of a run that saved, and ended, after this one began, or had read the checkpoint from which it goes on.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.checkpoint.files import folder, manifest
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.storage import objects
from shardkit.storage.url import Place


@dataclass
class Claim:
    """The checkpoints in a folder that a run knows. A new one that is not its own is that of another run."""

    root: Place
    known: set[str] = field(default_factory=set)
    run_ids: set[str] = field(default_factory=set)
    """This run's names in its checkpoints."""


def begin(root: Place) -> Claim:
    """On rank 0: the claim of a run that begins now, and knows what is there."""
    claim = Claim(root)
    for found in folder.steps(root):
        know(claim, found.path)
    return claim


def know(claim: Claim, path: Place) -> None:
    """Note that the run knows this checkpoint."""
    if (mark := _mark(path)) is not None:
        claim.known.add(mark)


def refuse_others(claim: Claim, run_id: str) -> None:
    """On rank 0, before a save: raises CheckpointSaveError where another run has saved here since this run began."""
    claim.run_ids.add(run_id)
    for found in folder.steps(claim.root):
        if (mark := _mark(found.path)) is None or mark in claim.known:
            continue
        try:
            record = manifest.read(found.path)
        except CheckpointError:  # not one of shardkit's
            continue
        if record.run_id not in claim.run_ids:
            raise _others(claim.root, record)
        claim.known.add(mark)


def _others(root: Place, record: manifest.Manifest) -> CheckpointSaveError:
    who = f"another run ({record.run_id[:12]})"
    return CheckpointSaveError(
        f"checkpoint: {root}: {who} has saved step {record.step} here ({record.created_utc[:19]} UTC) since this run "
        "began; use another folder, or start again with --resume auto once that one has ended, to go on from there."
    )


def _mark(path: Place) -> str | None:
    """What tells a checkpoint from one that takes its place; None where there is none."""
    file = path / manifest.NAME
    if not isinstance(file, Path):
        seen = objects.look(file)
        return None if seen is None else f"{path}:{seen.version}"
    with suppress(OSError):
        found = file.stat()  # without the number of the file, which some file systems make up
        return f"{path}:{found.st_mtime_ns}:{found.st_size}"
    return None
