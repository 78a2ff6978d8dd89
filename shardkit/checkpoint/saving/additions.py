"""Files that the user's save hooks add to a checkpoint: written to a staging folder, moved into the checkpoint, and
committed with it.

Any file name is allowed that the format does not use itself. The manifest lists their sizes and digests. A reader
verifies these files but does not open them.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, folder
from shardkit.checkpoint.files.manifest import NAME, File, is_addition
from shardkit.errors import CheckpointError

PROBE = ".probe"
"""The file in a new folder by which other ranks see that the folder is there (`put.wait_until_seen`)."""


@dataclass
class Staging:
    """A folder next to the future checkpoint that hooks write into. Rank 0 locks it so that no cleanup removes it."""

    path: Path
    hold: int | None = None

    def discard(self) -> None:
        """Remove the folder, on rank 0. Does nothing on other ranks and in a second call."""
        if self.hold is not None:
            os.close(self.hold)
            self.hold = None
            shutil.rmtree(self.path, ignore_errors=True)


def begin(final: Path, save_id: str) -> Staging:
    """On rank 0: an empty folder on the checkpoint's own file system."""
    path = folder.temporary_folder(final, f"{save_id}-hooks")
    folder.make(path.parent)
    path.mkdir()
    (path / PROBE).touch()
    return Staging(path, folder.hold(path))


def take(staging: Staging, temporary: Path, digest: str) -> dict[str, File]:
    """Move all files from the staging folder into the checkpoint that is being written, and return them by name.

    The files are durable afterwards. Call it on rank 0, after the hooks of all ranks have finished. Raises
    CheckpointError if a hook wrote a link, or a name that the checkpoint itself uses.
    """
    taken: dict[str, File] = {}
    (staging.path / PROBE).unlink()
    for here, folders, names in os.walk(staging.path, onerror=_refuse):
        links = [name for name in folders if (Path(here) / name).is_symlink()]  # which os.walk does not enter
        for name in [*names, *links]:
            source = Path(here) / name
            relative = source.relative_to(staging.path).as_posix()
            taken[relative] = _taken(source, relative, temporary, digest)
    return taken


def _refuse(error: OSError) -> None:
    """A folder that cannot be read; os.walk would pass over it."""
    raise error


def _taken(source: Path, name: str, temporary: Path, digest: str) -> File:
    target = temporary / name
    if source.is_symlink() or not source.is_file():
        raise CheckpointError(f"a save hook wrote {name}, which is not a regular file; write regular files, not links")
    if not is_addition(name):
        raise CheckpointError(f"a save hook wrote a file with an invalid name (got {name!r}); use another name")
    if os.path.lexists(target) or name == NAME:
        raise CheckpointError(f"a save hook wrote {name}, a name that the checkpoint itself uses; use another name")
    found = digests.new(digest)
    with open(source, "rb") as file:
        while block := file.read(disk.BLOCK_BYTES):
            found.update(memoryview(block))
        size = file.tell()
        os.fsync(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(source, target)
    return File(size, {0: found.hexdigest()})
