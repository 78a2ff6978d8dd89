"""Files and folders of a checkpoint. Reads never leave the checkpoint's folder; writes are durable when they return."""

import ctypes
import errno
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardkit import sizes
from shardkit.errors import CheckpointCorrupted
from shardkit.storage import objects
from shardkit.storage.url import Place, Url

# Bytes of one read or write call: large enough to make the cost of the call negligible, small enough for the cache.
BLOCK_BYTES = 8 << 20
# Limit for manifests, indices and states: a larger file, of which no manifest has the size, is not from shardkit.
JSON_LIMIT_BYTES = 256 << 20
# Writeback is started each time so many bytes are written: large enough that pages at the border, which are written
# twice, do not matter.
WRITEBACK_BYTES = 1 << 20
# What file systems answer that cannot sync folders: SMB and some of FUSE. They write entries at once, or as they will.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP)
# Flags for a file that must not exist yet.
NEW = os.O_CREAT | os.O_EXCL


class Durable:
    """A file that is written at any offset, and is durable when the `with` block ends. Every OSError names its path.

    Writeback of each range is started while the next one is computed; with fsync alone the disk would be idle until
    everything is written. `reach` is called with "open", "fsync" and "close", so that a test can inject faults there.
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
            self._begin = offset  # fsync writes the short range before
        while len(data):
            done = os.pwrite(self._descriptor, data, offset)
            data, offset = data[done:], offset + done
        self._end = offset
        if self._end - self._begin >= WRITEBACK_BYTES:
            _begin_writeback(self._descriptor, self._begin, self._end - self._begin)
            self._begin = self._end

    def extend(self, size: int) -> None:
        """Set the size of the file in bytes. Parts that are not written read as zeros."""
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
        if isinstance(error, OSError) and error.filename is None:  # else it is of another file
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if error is None:
            self._reach("close")


def _begin_writeback(descriptor: int, offset: int, length: int) -> None:
    """Start writeback: on POSIX_FADV_DONTNEED Linux begins to write dirty pages, and keeps them (posix_fadvise(2))."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        with suppress(OSError):  # the file system may not support it
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def write_new(path: Path, data: bytes, size: int | None = None) -> None:
    """Create a file that begins with the data and is `size` bytes long. Durable, except for its entry in the folder."""
    with Durable(path, NEW) as file:
        file.put(memoryview(data), 0)
        if size is not None:
            file.extend(size)


def replace_json(path: Place, value: Any) -> None:
    """Replace a file atomically: a reader sees the complete old value or the complete new one."""
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
    """Canonical JSON: sorted keys, no spaces, UTF-8, no NaN."""
    return _encoded(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def to_json_in_order(value: Any) -> bytes:
    """JSON that keeps the order of keys; for the index, which defines the order of tensors in files."""
    return _encoded(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False))


def _encoded(text: str) -> bytes:
    """UTF-8; what it cannot encode, such as the bytes of a path in another encoding, as JSON's escapes."""
    return text.encode(errors="backslashreplace")


def from_json(text: bytes, where: str) -> Any:
    """Parse strict JSON: no duplicate keys, no NaN. Raises CheckpointCorrupted with `where` on anything else."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupted(f"{where}: not valid JSON ({error}); the file is damaged.") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable, where the file system can."""
    descriptor = open_folder(path)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


@contextmanager
def reading(folder: Path, name: str, at: int | None = None) -> Iterator[int]:
    """A descriptor of a regular file below a folder. Raises CheckpointCorrupted if a part of the path is a link, or
    the folder is gone.

    `at`: an open descriptor of the folder, which stays valid if another folder gets its name meanwhile.
    """
    try:
        descriptors = [open_folder(folder) if at is None else os.dup(at)]
    except FileNotFoundError:
        raise _deleted(folder) from None
    try:
        parts = name.split("/")
        for part in parts[:-1]:
            descriptors.append(_enter(part, os.O_DIRECTORY, descriptors[-1], folder, name))
        descriptor = _enter(parts[-1], 0, descriptors[-1], folder, name)
        descriptors.append(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointCorrupted(f"{folder / name}: not a regular file; the checkpoint is damaged.")
        yield descriptor
    finally:
        for opened in reversed(descriptors):
            os.close(opened)


def is_there(path: Place) -> bool:
    """Whether a file or folder exists; in a store, anything below this name. OSError where the disk does not tell,
    which Path.exists() hides from Python 3.14 on: a checkpoint that cannot be looked at is not the same as none."""
    if isinstance(path, Url):
        return objects.is_there(path)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def open_folder(path: Path) -> int:
    """A descriptor of a folder. Links are followed."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _deleted(folder: Path) -> CheckpointCorrupted:
    return CheckpointCorrupted(f"{folder}: was deleted; use another checkpoint.")


def _enter(part: str, flags: int, parent: int, folder: Path, name: str) -> int:
    where = folder / name
    try:
        return os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=parent)
    except FileNotFoundError:
        if not os.path.lexists(folder):  # as by a run's retention, while the folder is open here
            raise _deleted(folder) from None
        raise CheckpointCorrupted(f"{where}: missing; the checkpoint is incomplete.") from None
    except OSError as error:
        raise CheckpointCorrupted(f"{where}: cannot be read ({error.strerror}).") from error


def read_small(folder: Place, name: str, at: int | None = None, stated_bytes: int = 0) -> bytes:
    """The contents of a small file; `at` as in `reading`. `stated_bytes`: its size by the manifest; it may be above
    the limit, since objects of a script may have any number of values."""
    limit = max(JSON_LIMIT_BYTES, stated_bytes)
    if isinstance(folder, Url):
        return _read_object(folder / name, limit)
    with reading(folder, name, at) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointCorrupted(
                f"{folder / name}: too large for this file (got {size} bytes, limit {limit}); it is damaged."
            )
        return read_at(descriptor, 0, size, str(folder / name))


def _read_object(url: Url, limit: int) -> bytes:
    try:
        return objects.read(url, limit)
    except FileNotFoundError:
        raise CheckpointCorrupted(f"{url}: missing; the checkpoint is incomplete.") from None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise CheckpointCorrupted(f"{url}: {error.strerror}; it is damaged.") from error


Source = int | objects.Reader
"""A source of bytes: a file descriptor, or an object in a store."""


def read_at(source: Source, offset: int, length: int, where: str) -> bytes:
    """Exactly `length` bytes. Raises CheckpointCorrupted if the file ends earlier."""
    data = bytearray(length)
    read_into(source, memoryview(data), offset, where)
    return bytes(data)


def read_into(source: Source, target: memoryview, offset: int, where: str) -> None:
    """Fill the target with the bytes from an offset on. Raises CheckpointCorrupted if the file ends earlier, or if the
    disk cannot read them."""
    while len(target):
        block = target[:BLOCK_BYTES]
        done = _preadv(source, block, offset, where) if isinstance(source, int) else source.read_into(block, offset)
        if not done:
            raise CheckpointCorrupted(f"{where}: ends at byte {offset}; it is truncated.")
        target, offset = target[done:], offset + done


def _preadv(descriptor: int, block: memoryview, offset: int, where: str) -> int:
    try:
        return os.preadv(descriptor, [block], offset)
    except OSError as error:  # a bad sector, a file system that has failed: no other reader would see more
        raise CheckpointCorrupted(
            f"{where}: cannot be read ({error.strerror}); look at that disk or file system."
        ) from error


def publish(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name. FileExistsError if that name is taken, except by an empty folder."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if final.exists():
            raise FileExistsError(error.errno, "a folder of this name exists", str(final)) from error
        raise


def exchange(temporary: Path, final: Path) -> None:
    """Swap a finished folder with the one that has its final name: atomically where the system supports it (renameat2
    on Linux).

    Elsewhere the old one is first renamed to `.old-<name>`; `folder.heal` renames it back after a crash in between. A
    reader that does so meanwhile is in the way of the second rename, so it is tried again.
    """
    if _exchange_at_once(temporary, final):
        return
    aside = final.with_name(f".old-{final.name}")
    for tries_left in (2, 1, 0):
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
            break
        except OSError:
            with suppress(OSError):  # a reader did it
                os.rename(aside, final)
            if not tries_left:
                raise
    os.rename(aside, temporary)


def _exchange_at_once(first: Path, second: Path) -> bool:
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    at_fdcwd, rename_exchange = -100, 2  # linux/fcntl.h and linux/fs.h
    return swap(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0


def lack_of_space(folder: Path, needed: int) -> str | None:
    """What is wrong where the folder's file system has fewer free bytes than needed; None where it has as many."""
    free = free_bytes(folder)
    if free >= needed:
        return None
    return f"No space left on device: need {sizes.in_words(needed)}, {sizes.in_words(free)} free"


def free_bytes(path: Path) -> int:
    """Free bytes of the file system for unprivileged users."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
