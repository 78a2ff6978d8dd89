"""Access to the files of one checkpoint, in a folder on a disk or in an object store."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from shardkit.checkpoint.files import disk
from shardkit.errors import CheckpointCorrupted
from shardkit.storage import objects
from shardkit.storage.url import Place, Url


class Folder(Protocol):
    """Read access to the files of a checkpoint, until `close`."""

    def small(self, name: str) -> bytes:
        """The contents of a small file."""

    def opened(self, name: str) -> AbstractContextManager[Any]:
        """A source for `disk.read_into`. Raises CheckpointCorrupted if the file does not exist."""

    def state(self, name: str, source: Any) -> Any:
        """A value that changes when the file is rewritten."""

    def close(self) -> None: ...


def folder(place: Place) -> Folder:
    """The folder at a place. On a disk it stays the same folder, even if another one gets its name meanwhile."""
    return InStore(place) if isinstance(place, Url) else OnDisk(place)


class OnDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = disk.open_folder(path)

    def small(self, name: str) -> bytes:
        return disk.read_small(self.path, name, self._descriptor)

    def opened(self, name: str) -> AbstractContextManager[int]:
        return disk.reading(self.path, name, self._descriptor)

    def state(self, name: str, source: int) -> Any:
        found = os.fstat(source)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def close(self) -> None:
        os.close(self._descriptor)


class InStore:
    def __init__(self, url: Url) -> None:
        self.url = url

    def small(self, name: str) -> bytes:
        return disk.read_small(self.url, name)

    @contextmanager
    def opened(self, name: str) -> Iterator[objects.Reader]:
        try:
            yield objects.Reader(self.url / name)
        except FileNotFoundError:
            raise CheckpointCorrupted(f"{self.url / name}: missing; the checkpoint is incomplete.") from None

    def state(self, name: str, source: objects.Reader) -> Any:
        return objects.look(self.url / name)

    def close(self) -> None: ...
