"""Files that the user's save hooks add to a checkpoint: written beside it, then moved into it and committed with it.

They may have any names that the format does not use itself. The manifest has their sizes and digests; a reader
verifies them, and opens none.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardkit.checkpoint import digest as digests
from shardkit.checkpoint import disk, folder
from shardkit.checkpoint.manifest import NAME, File, is_addition
from shardkit.errors import CheckpointError

PROBE = ".probe"


@dataclass
class Staging:
    """A folder beside the checkpoint to be, into which hooks write. On rank 0 it is held against cleaning up."""

    path: Path
    hold: int | None = None

    def discard(self) -> None:
        """Remove what is left of it. On rank 0; nothing elsewhere, nor in a second call."""
        if self.hold is not None:
            os.close(self.hold)
            self.hold = None
            shutil.rmtree(self.path, ignore_errors=True)


def begin(final: Path, save_id: str) -> Staging:
    """On rank 0: an empty folder on the checkpoint's own file system."""
    path = folder.temporary_folder(final, f"{save_id}-hooks")
    path.mkdir(parents=True)
    (path / PROBE).touch()
    return Staging(path, folder.hold(path))


def take(staging: Staging, temporary: Path, digest: str) -> dict[str, File]:
    """Move everything from the staging folder into the checkpoint that is being written; on disk afterwards. By name.

    On rank 0, once all ranks have written theirs. CheckpointError where a hook wrote a link, or what has a name that
    the checkpoint itself uses.
    """
    taken: dict[str, File] = {}
    (staging.path / PROBE).unlink()
    for here, _, names in os.walk(staging.path):
        for name in names:
            source = Path(here) / name
            relative = source.relative_to(staging.path).as_posix()
            taken[relative] = _taken(source, relative, temporary, digest)
    return taken


def _taken(source: Path, name: str, temporary: Path, digest: str) -> File:
    target = temporary / name
    if source.is_symlink() or not source.is_file():
        raise CheckpointError(f"a save hook wrote {name}, which is no plain file; write files, and no links")
    if not is_addition(name):
        raise CheckpointError(f"a save hook wrote a file of a name that cannot be kept (got {name!r}); give it another")
    if os.path.lexists(target) or name == NAME:
        raise CheckpointError(f"a save hook wrote {name}, which the checkpoint has itself; give it another name")
    found = digests.new(digest)
    with open(source, "rb") as file:
        while block := file.read(disk.BLOCK_BYTES):
            found.update(memoryview(block))
        size = file.tell()
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(source, target)
    return File(size, {0: found.hexdigest()})
