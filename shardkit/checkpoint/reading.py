"""The files of one checkpoint, for whoever reads them: in a folder on a disk, or in a store of objects."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from shardkit.checkpoint import disk
from shardkit.errors import CheckpointCorrupted
from shardkit.storage import objects
from shardkit.storage.url import Place, Url


class Folder(Protocol):
    """Where the files are, until it is closed."""

    def small(self, name: str) -> bytes:
        """The whole of a small file."""

    def opened(self, name: str) -> AbstractContextManager[Any]:
        """What `disk.read_into` reads a file from. CheckpointCorrupted where there is no such file."""

    def state(self, name: str, source: Any) -> Any:
        """Another value once the file was written anew."""

    def close(self) -> None: ...


def folder(place: Place) -> Folder:
    """The folder that has the name now; on a disk it stays that one where another gets the name meanwhile."""
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
