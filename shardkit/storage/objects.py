"""What is asked of a store of objects, whichever it is: fsspec knows how.

    look, read, Reader          one object: whether it is there, all of it, ranges of it
    names, below                what there is
    put_new, put_over, put      one small object at once; put_new and put_over only where nobody was faster
    remove                      an object, and all below its name

What fails is tried again, TRIES times in all, with a line in the log; then it is an OSError that names the place.
An answer that was lost is no failure: what lies there is read and compared.
"""

import errno
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from shardkit.errors import MachineError, ShardkitError, UsageError
from shardkit.log import get_logger
from shardkit.storage.url import Url

TRIES = 4
# Before the second try; doubled before each further one. The packages below us have tried by themselves, too.
PAUSE_S = 0.5
# Short reads are served from a window of so many bytes: a request costs as much as reading about so much.
WINDOW_BYTES = 1 << 20
# Stores that are known to refuse a PUT that may only create, atomically (if they are what they say: `is_exclusive`).
CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
EXTRAS = {"s3fs": "shardkit[s3]", "gcsfs": "shardkit[gcs]"}

logger = get_logger(__name__)
Result = TypeVar("Result")


class OutcomeUnknown(OSError):
    """A write of which nobody knows whether it was done, or will be."""


class NoAnswer(OSError):
    """The store has failed, in every try; this tells nothing of what lies in it."""


@dataclass(frozen=True)
class Seen:
    """An object as the store tells of it; `version` is another one whenever it is written."""

    bytes: int
    version: str


# ---- the store ----


def file_system(url: Url) -> tuple[Any, str]:
    """fsspec's file system, which keeps no listings, and the name in its words.

    MachineError where a package is missing, UsageError where there is no such store.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(str(url), use_listings_cache=False)
    except ImportError as error:
        package = PACKAGES.get(url.scheme)
        advice = f"pip install '{EXTRAS.get(package, package)}'" if package else "install it"
        what = f"the package {package}" if package else str(error)
        raise MachineError(
            f"storage: {url}: {url.scheme}:// needs {what}, which is not installed; {advice}."
        ) from error
    except ValueError as error:
        raise UsageError(f"storage: {url}: no such kind of store ({error}); use s3://, gs:// or a folder.") from error


def _ask(url: Url, what: str, action: Callable[[Any, str], Result], tries: int = TRIES) -> Result:
    """What the store answers. FileNotFoundError and FileExistsError are answers; anything else is tried again."""
    store, name = file_system(url)
    for number in range(1, tries + 1):
        try:
            return action(store, name)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            if (trouble := refusal(url, what, error)) is not None:
                raise trouble from error
            if tries == 1:
                raise failure(url, what, error) from error
            if number == tries:
                raise NoAnswer(number_of(error), f"{what} failed {tries} times ({words(error)})", str(url)) from error
            wait_after(number, f"{url}: {what} failed ({words(error)})", tries)
    raise AssertionError("unreachable: the last try returns or raises")


def wait_after(number: int, trouble: str, tries: int = TRIES) -> None:
    """After a try that failed, the first one being 1: say so, and wait, each time for twice as long."""
    pause = PAUSE_S * 2 ** (number - 1)
    logger.warning("storage: %s; try %d of %d in %.1f s.", trouble, number + 1, tries, pause)
    time.sleep(pause)


def refusal(url: Url, what: str, error: Exception) -> OSError | None:
    """What no further try would change: an error to raise. None where another try may help."""
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return PermissionError(errno.EACCES, f"{what} is refused ({words(error)}); see to the credentials", str(url))
    if isinstance(error, NotImplementedError):
        return OSError(errno.EROFS, f"{what} is something that {url.scheme}:// cannot do", str(url))
    return None


def number_of(error: Exception) -> int:
    return (error.errno if isinstance(error, OSError) else None) or errno.EIO


def failure(url: Url, what: str, error: Exception) -> OSError:
    """What a try ended with, as an OSError that names the place."""
    return OSError(number_of(error), f"{what} failed ({words(error)})", str(url))


def words(error: Exception) -> str:
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error) or type(error).__name__
    return text.strip().rstrip(".").replace("\n", " ")


# ---- looking and reading ----


def look(url: Url) -> Seen | None:
    """The object of this name; None where there is none."""
    try:
        told = _ask(url, "looking", lambda store, name: store.info(name))
    except FileNotFoundError:
        return None
    return None if told["type"] == "directory" else _seen(told)


def _seen(told: dict[str, Any]) -> Seen:
    marks = ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")
    version = next((str(told[mark]) for mark in marks if told.get(mark) is not None), "")
    return Seen(int(told["size"] or 0), version)


def modified(url: Url) -> datetime:
    """When an object was written, by the store's clock. OSError where the store does not tell."""
    return _ask(url, "telling when it was written", lambda store, name: store.modified(name))


def read(url: Url, limit_bytes: int) -> bytes:
    """The whole of a small object; FileNotFoundError where there is none, OSError where it is larger."""
    data = _ask(url, "reading", lambda store, name: store.cat_file(name, start=0, end=limit_bytes + 1))
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"more than {limit_bytes} bytes, too many for such a file", str(url))
    return data


class Reader:
    """The bytes of one object, by ranged reads. FileNotFoundError where there is none."""

    def __init__(self, url: Url) -> None:
        found = look(url)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(url))
        self.url, self.seen = url, found
        self._window, self._begin = b"", 0

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill the target from an offset, as far as there is anything; how many bytes that were."""
        wanted = max(0, min(len(target), self.seen.bytes - offset))
        if wanted >= WINDOW_BYTES:
            target[:wanted] = self._range(offset, wanted)
        elif wanted:
            if not self._begin <= offset <= offset + wanted <= self._begin + len(self._window):
                self._window = self._range(offset, min(WINDOW_BYTES, self.seen.bytes - offset))
                self._begin = offset
            at = offset - self._begin
            target[:wanted] = self._window[at : at + wanted]
        return wanted

    def _range(self, offset: int, length: int) -> bytes:
        def get(store: Any, name: str) -> bytes:
            data = store.cat_file(name, start=offset, end=offset + length)
            if len(data) != length:
                raise OSError(errno.EIO, f"{len(data)} bytes came where {length} were asked for")
            return data

        return _ask(self.url, "reading", get)


def names(url: Url) -> list[str]:
    """What there is one level below the name, as the store lists it; nothing where there is nothing."""
    try:
        told = _ask(url, "listing", lambda store, name: (store.ls(name, detail=True), name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found, own = told
    paths = [str(item["name"]).rstrip("/") for item in found]
    return sorted({path.rpartition("/")[2] for path in paths if path.strip("/") != own.strip("/")})


def below(url: Url) -> dict[str, Seen]:
    """Every object below the name, by what its own name has more."""
    try:
        found, own = _ask(url, "listing", lambda store, name: (store.find(name, detail=True), name))
    except FileNotFoundError:
        return {}
    begin = own.strip("/") + "/"
    return {
        path.strip("/").removeprefix(begin): _seen(told)
        for path, told in found.items()
        if path.strip("/").startswith(begin) and told["type"] != "directory"
    }


def is_there(url: Url) -> bool:
    """Whether there is an object of this name, or any below it."""
    try:
        return bool(_ask(url, "looking", lambda store, name: store.info(name)))
    except FileNotFoundError:
        return False


# ---- writing ----


def put(url: Url, data: bytes) -> None:
    """The object is this from now on."""
    _ask(url, "writing", lambda store, name: store.pipe_file(name, data))


def put_new(url: Url, data: bytes) -> None:
    """The object is this, and was nothing before. FileExistsError where there is another.

    OutcomeUnknown where no try was answered, and it is not there: it may appear later.
    """
    _settle(url, data, None, lambda store, name: store.pipe_file(name, data, mode="create"))


def put_over(url: Url, data: bytes, before: Seen) -> None:
    """The object is this, and was `before`. FileExistsError where it was another by then; OutcomeUnknown as `put_new`.

    S3 compares and writes in one step; elsewhere it is looked at first, and two writers of the same moment may both
    believe that they were alone.
    """

    def write(store: Any, name: str) -> None:
        if url.scheme in ("s3", "s3a"):
            store.pipe_file(name, data, IfMatch=before.version)
            return
        if look(url) != before:
            raise FileExistsError
        store.pipe_file(name, data)

    _settle(url, data, before, write)


def _settle(url: Url, data: bytes, before: Seen | None, write: Callable[[Any, str], Any]) -> None:
    """A write that is done once, whatever answers are lost: where it is refused or fails, what is there decides."""
    failed: Exception = OSError()
    for _ in range(TRIES):
        try:
            _ask(url, "writing", write, tries=1)
            return
        except PermissionError:
            raise
        except FileNotFoundError as error:  # the bucket; or the object that was to be replaced
            if before is None:
                raise
            failed = error
        except OSError as error:  # FileExistsError too: it may be our own, of which the answer was lost
            failed = error
        try:
            there = _whole(url, len(data))
        except OSError as error:
            failed = error
            continue
        if there == data:
            logger.warning("storage: %s: the answer to a write was lost (%s); it is done.", url, words(failed))
            return
        if is_refusal(failed) or (before is None and there is not None):
            raise FileExistsError(errno.EEXIST, "somebody else has written it", str(url)) from failed
        logger.warning("storage: %s: writing was not answered (%s); looking and trying again.", url, words(failed))
        time.sleep(PAUSE_S)
    raise OutcomeUnknown(errno.EIO, f"nobody knows whether it was written ({words(failed)})", str(url)) from failed


def is_refusal(error: Exception) -> bool:
    """Whether the store said that the condition of a write does not hold."""
    return isinstance(error, (FileExistsError, FileNotFoundError)) or "condition" in words(error).lower()


def _whole(url: Url, size: int) -> bytes | None:
    try:
        return read(url, size)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            return b""  # another one
        raise


def remove(url: Url) -> None:
    """The object is gone, and all below its name. Nothing happens where there is nothing."""
    with suppress(FileNotFoundError):
        _ask(url, "deleting", lambda store, name: store.rm(name, recursive=True))


# ---- what a store can do ----


@lru_cache(maxsize=64)
def is_exclusive(folder: Url) -> bool:
    """Whether a PUT that may only create is refused where there is an object. Asked once: writes and deletes one."""
    probe = folder / f".probe-{time.time_ns():x}"
    try:
        _ask(probe, "writing", lambda store, name: store.pipe_file(name, b"1"))
        try:
            _ask(probe, "writing", lambda store, name: store.pipe_file(name, b"2", mode="create"), tries=1)
        except OSError as error:
            if not is_refusal(error):
                raise
            return folder.scheme in CONDITIONAL
        return False
    finally:
        with suppress(OSError):
            remove(probe)


def problem(folder: Url) -> str | None:
    """What would keep a run from saving there, found by writing, reading and deleting an object; None: nothing."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        file_system(folder)  # what is wrong with it names the folder, alike on all ranks
        put(probe, b"probe")
        found = read(probe, 5)
        remove(probe)
    except ShardkitError as error:
        return str(error)
    except OSError as error:
        what = f"{folder.parts[0]}: no such bucket" if isinstance(error, FileNotFoundError) else error.strerror
        return f"storage: {folder}: nothing can be saved here: {what}."
    return None if found == b"probe" else f"storage: {folder}: what is written is not what is read; see to the store."


def nothing_there(url: Url) -> str | None:
    """Why nothing can be loaded from there; None where there is something."""
    try:
        return None if is_there(url) else f"storage: {url}: there is nothing of this name; see to its spelling."
    except ShardkitError as error:
        return str(error)
    except OSError as error:
        return f"storage: {url}: cannot be read: {error.strerror}."
