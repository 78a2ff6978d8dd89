"""Files and folders of a checkpoint: reading touches nothing outside, and what returns from writing is durable."""

import ctypes
import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardkit.errors import CheckpointCorrupted
from shardkit.storage import objects
from shardkit.storage.url import Place, Url

# One read or write call; large enough that the call itself costs nothing, small enough to stay in the cache.
BLOCK_BYTES = 8 << 20
# Manifests, indices and states are small; anything larger is not ours.
JSON_LIMIT_BYTES = 256 << 20
# How much is written before the system is told to begin with it: enough that border pages, written twice, do not count.
WRITEBACK_BYTES = 1 << 20
# Flags of a file that must not exist before.
NEW = os.O_CREAT | os.O_EXCL


class Durable:
    """A file that is written at any offset, and is on disk when the block ends. Every OSError names its path.

    The system is told to begin with each stretch while the next one is made; fsync alone would leave the disk idle
    until everything is written. `reach` is told of "open", "fsync" and "close", where a test may make them fail.
    """

    def __init__(self, path: Path, flags: int = 0, reach: Callable[[str], None] = lambda point: None) -> None:
        self.path, self._flags, self._reach = path, flags, reach
        self._begin = self._end = 0

    def __enter__(self) -> "Durable":
        self._reach("open")
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | self._flags, 0o666)
        return self

    def put(self, data: memoryview, offset: int) -> None:
        """Write every byte at an offset."""
        if offset != self._end:
            self._begin = offset  # a small stretch before is left to fsync
        while len(data):
            done = os.pwrite(self._descriptor, data, offset)
            data, offset = data[done:], offset + done
        self._end = offset
        if self._end - self._begin >= WRITEBACK_BYTES:
            _begin_writeback(self._descriptor, self._begin, self._end - self._begin)
            self._begin = self._end

    def extend(self, size: int) -> None:
        """Make the file so many bytes long; what is not written reads as zeros."""
        os.ftruncate(self._descriptor, size)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._reach("fsync")
                os.fsync(self._descriptor)
        except OSError as failed:
            raise OSError(failed.errno, failed.strerror, str(self.path)) from failed
        finally:
            os.close(self._descriptor)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if error is None:
            self._reach("close")


def _begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Linux begins to write pages that are said to be needed no more; those not yet written stay (posix_fadvise(2))."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError):  # a file system that takes no advice
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def write_new(path: Path, data: bytes, size: int | None = None) -> None:
    """A new file that begins with the data and is `size` bytes long; on disk, but for its name in the folder."""
    with Durable(path, NEW) as file:
        file.put(memoryview(data), 0)
        if size is not None:
            file.extend(size)


def replace_json(path: Place, value: Any) -> None:
    """Set a file to a value in one step: whoever reads sees the old one or the new one, whole."""
    if isinstance(path, Url):
        objects.put(path, to_json(value))
        return
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_new(temporary, to_json(value))
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    sync_folder(path.parent)


def to_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no blanks, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def to_json_in_order(value: Any) -> bytes:
    """JSON that keeps the order of keys; for the index, whose order is the order of the files."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def from_json(text: bytes, where: str) -> Any:
    """The value of strict JSON: no key twice, no NaN; CheckpointCorrupted with `where` on anything else."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupted(f"{where}: not valid JSON ({error}); the file is damaged.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = open_folder(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def reading(folder: Path, name: str, at: int | None = None) -> Iterator[int]:
    """A descriptor of a plain file below a folder. CheckpointCorrupted where it, or a folder on the way, is a link.

    `at`: a descriptor of the folder itself, which stays what it is where another folder gets the name meanwhile.
    """
    descriptors = [open_folder(folder) if at is None else os.dup(at)]
    try:
        parts = name.split("/")
        for part in parts[:-1]:
            descriptors.append(_enter(part, os.O_DIRECTORY, descriptors[-1], folder / name))
        descriptor = _enter(parts[-1], 0, descriptors[-1], folder / name)
        descriptors.append(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointCorrupted(f"{folder / name}: not a plain file; it does not belong to a checkpoint.")
        yield descriptor
    finally:
        for opened in reversed(descriptors):
            os.close(opened)


def open_folder(path: Path) -> int:
    """A descriptor of a folder; of the one that a link leads to."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _enter(part: str, flags: int, parent: int, where: Path) -> int:
    try:
        return os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=parent)
    except FileNotFoundError:
        raise CheckpointCorrupted(f"{where}: missing; the checkpoint is incomplete.") from None
    except OSError as error:
        raise CheckpointCorrupted(f"{where}: cannot be read ({error.strerror}).") from error


def read_small(folder: Place, name: str, at: int | None = None) -> bytes:
    """The whole of a small file; `at` as in `reading`."""
    if isinstance(folder, Url):
        return _read_object(folder / name)
    with reading(folder, name, at) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > JSON_LIMIT_BYTES:
            raise CheckpointCorrupted(f"{folder / name}: {size} bytes are too many for such a file; it is damaged.")
        return read_at(descriptor, 0, size, str(folder / name))


def _read_object(url: Url) -> bytes:
    try:
        return objects.read(url, JSON_LIMIT_BYTES)
    except FileNotFoundError:
        raise CheckpointCorrupted(f"{url}: missing; the checkpoint is incomplete.") from None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise CheckpointCorrupted(f"{url}: {error.strerror}; it is damaged.") from error


Source = int | objects.Reader
"""What bytes are read from: a descriptor, or an object in a store."""


def read_at(source: Source, offset: int, length: int, where: str) -> bytes:
    """Exactly `length` bytes; CheckpointCorrupted where the file ends before."""
    data = bytearray(length)
    read_into(source, memoryview(data), offset, where)
    return bytes(data)


def read_into(source: Source, target: memoryview, offset: int, where: str) -> None:
    """Fill the target from an offset; CheckpointCorrupted where the file ends before."""
    while len(target):
        block = target[:BLOCK_BYTES]
        done = os.preadv(source, [block], offset) if isinstance(source, int) else source.read_into(block, offset)
        if not done:
            raise CheckpointCorrupted(f"{where}: ends at byte {offset}; it was cut short.")
        target, offset = target[done:], offset + done


def publish(temporary: Path, final: Path) -> None:
    """Give a finished folder its name; FileExistsError where something other than an empty folder has it."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if final.exists():
            raise FileExistsError(error.errno, "a folder of this name exists", str(final)) from error
        raise


def exchange(temporary: Path, final: Path) -> None:
    """Swap a finished folder with the one that has its name, in one step where the system can (Linux renameat2).

    Elsewhere the old one is renamed to `.old-<name>` first; `folder.heal` puts it back after a crash in between.
    """
    if _exchange_at_once(temporary, final):
        return
    aside = final.with_name(f".old-{final.name}")
    os.rename(final, aside)
    os.rename(temporary, final)
    os.rename(aside, temporary)


def _exchange_at_once(first: Path, second: Path) -> bool:
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    at_fdcwd, rename_exchange = -100, 2  # linux/fcntl.h and linux/fs.h
    return swap(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0


def remove_folder(path: Path) -> None:
    """Delete a folder so that no half of it is ever seen under its name."""
    trash = path.with_name(f".trash-{uuid.uuid4().hex[:8]}")
    os.rename(path, trash)
    shutil.rmtree(trash)


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write there."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
