"""Requests to object stores, through fsspec.

    look, read, Reader          one object: its metadata, its contents, byte ranges of it
    names, below                listings
    put_new, put_over, put      write one small object; put_new and put_over only if no other writer was faster
    remove                      delete an object, and all objects below its name

A failed request is repeated, up to TRIES times in total, with a warning in the log. Then it raises an OSError that
names the URL. After a write without an answer, the object is read and compared.
"""

import errno
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from glob import has_magic
from http import HTTPStatus
from typing import Any, TypeVar

from shardkit.errors import MachineError, ShardkitError, UsageError
from shardkit.log import get_logger
from shardkit.storage import waiting
from shardkit.storage.url import Url

TRIES = 4
# Pause before the second try; doubled before each further one. The packages of fsspec retry as well.
PAUSE_S = 0.5
# Short reads are served from a window of so many bytes: one request costs about as much as reading them.
WINDOW_BYTES = 1 << 20
# Stores with atomic conditional creation of objects; `is_exclusive` tests whether the actual server supports it.
CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "adlfs"),
}
# By a word in what a store says when it denies a request.
REMEDIES = {
    "expired": "renew the credentials, and start again",
    "request time": "set the clock of this machine",  # "the difference between the request time and the current time"
}
EXTRAS = {"s3fs": "shardkit[s3]", "gcsfs": "shardkit[gcs]"}
_PHRASES = frozenset(status.phrase for status in HTTPStatus)

log = get_logger(__name__)
Result = TypeVar("Result")


class OutcomeUnknown(OSError):
    """It is unknown whether a write was done, or will be."""


class NoAnswer(OSError):
    """All tries of a request failed, so nothing is known about the contents of the store."""


@dataclass(frozen=True)
class Seen:
    """The size and version of an object; `version` changes with every write."""

    bytes: int
    version: str


# ---- the store ----


def file_system(url: Url) -> tuple[Any, str]:
    """(fsspec's file system, without a cache of listings; the name of the URL in it).

    Raises MachineError if a package is missing, UsageError for an unknown kind of store.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(str(url), use_listings_cache=False)
    except ImportError as error:
        package = PACKAGES.get(url.scheme)
        advice = f"pip install '{EXTRAS.get(package, package)}'" if package else "install it"
        what = f"the package {package}, which is not installed" if package else f"a package that is missing ({error})"
        raise MachineError(f"storage: {url}: {url.scheme}:// needs {what}; {advice}.") from error
    except ValueError as error:
        raise UsageError(f"storage: {url}: unknown kind of store ({error}); use s3://, gs:// or a folder.") from error


def _ask(url: Url, what: str, action: Callable[[Any, str], Result], tries: int = TRIES) -> Result:
    """The result of a request. Raises what says whether an object is there; after other errors it is repeated."""
    store, name = file_system(url)
    for number in range(1, tries + 1):
        try:
            with waiting.told(url, what):
                return action(store, name)
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            raise
        except Exception as error:
            if (trouble := refusal(url, what, error)) is not None:
                raise trouble from error
            if tries == 1:
                raise failure(url, what, error) from error
            if number == tries:
                raise NoAnswer(
                    number_of(error), f"{what} failed {tries} times ({message_of(error)})", str(url)
                ) from error
            wait_after(number, f"{url}: {what} failed ({message_of(error)})", tries)
    raise AssertionError("unreachable: the last try returns or raises")


def wait_after(number: int, trouble: str, tries: int = TRIES) -> None:
    """After failed try `number` (from 1): log a warning and wait, each time twice as long."""
    pause = PAUSE_S * 2 ** (number - 1)
    log.warning("storage: %s; try %d of %d in %.1f s.", trouble, number + 1, tries, pause)
    time.sleep(pause)


def refusal(url: Url, what: str, error: Exception) -> OSError | None:
    """The error to raise if a repetition would fail, too; None if it may succeed."""
    if isinstance(error, PermissionError) or any(word in type(error).__name__ for word in ("Credential", "Token")):
        said = message_of(error)
        advice = next((todo for word, todo in REMEDIES.items() if word in said.lower()), "check the credentials")
        return PermissionError(errno.EACCES, f"{what} was denied ({said}); {advice}", str(url))
    if isinstance(error, NotImplementedError):
        return OSError(errno.EROFS, f"{what} is not supported by {url.scheme}://", str(url))
    return None


def number_of(error: Exception) -> int:
    return (error.errno if isinstance(error, OSError) else None) or errno.EIO


def failure(url: Url, what: str, error: Exception) -> OSError:
    """The error of a try as an OSError that names the URL."""
    return OSError(number_of(error), f"{what} failed ({message_of(error)})", str(url))


def message_of(error: Exception) -> str:
    text = str(error.strerror if isinstance(error, OSError) and error.strerror else error) or type(error).__name__
    return text.strip().rstrip(".").replace("\n", " ")


# ---- looking and reading ----


def look(url: Url) -> Seen | None:
    """The size and version of an object; None if it does not exist."""
    try:
        info = _ask(url, "looking", _info)
    except (FileNotFoundError, NotADirectoryError):  # the second of stores with folders, such as sftp://
        return None
    return None if info["type"] == "directory" else _seen(info)


def _info(store: Any, name: str) -> dict[str, Any]:
    """Its metadata. The answer to HEAD has no body, so it says no more than "Bad Request" of an expired token: the
    reason is in the answer to GET."""
    try:
        return store.info(name)
    except OSError as error:
        if not (isinstance(error, PermissionError) or message_of(error) in _PHRASES):
            raise
        with suppress(FileNotFoundError, IsADirectoryError):
            store.cat_file(name, start=0, end=1)
        raise


def _seen(info: dict[str, Any]) -> Seen:
    marks = ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")
    version = next((str(info[mark]) for mark in marks if info.get(mark) is not None), "")
    return Seen(int(info["size"] or 0), version)


def modified(url: Url) -> datetime:
    """When an object was written, by the store's clock. Raises OSError if the store does not provide it."""
    return _ask(url, "reading the modification time", lambda store, name: store.modified(name))


def read(url: Url, limit_bytes: int) -> bytes:
    """The contents of a small object. Raises FileNotFoundError if it does not exist, OSError if it is larger."""
    data = _ask(url, "reading", lambda store, name: store.cat_file(name, start=0, end=limit_bytes + 1))
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than the limit of {limit_bytes} bytes for this file", str(url))
    return data


class Reader:
    """The bytes of one object, by ranged reads. Raises FileNotFoundError if it does not exist."""

    def __init__(self, url: Url) -> None:
        found = look(url)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(url))
        self.url, self.seen = url, found
        self._window, self._begin = b"", 0

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill the target with bytes from an offset on. Returns their number, fewer at the end of the object."""
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
                raise OSError(errno.EIO, f"the store returned {len(data)} of {length} bytes")
            return data

        return _ask(self.url, "reading", get)


def names(url: Url) -> list[str]:
    """The names one level below a URL, from the store's listing; empty if there are none."""
    try:
        found, own = _ask(url, "listing", lambda store, name: (store.ls(name, detail=True), name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [str(item["name"]).rstrip("/") for item in found]
    return sorted({path.rpartition("/")[2] for path in paths if path.strip("/") != own.strip("/")})


def below(url: Url) -> dict[str, Seen]:
    """{relative name: object} of all objects below a URL."""
    try:
        found, own = _ask(url, "listing", lambda store, name: (store.find(name, detail=True), name))
    except FileNotFoundError:
        return {}
    begin = own.strip("/") + "/"
    return {
        path.strip("/").removeprefix(begin): _seen(info)
        for path, info in found.items()
        if path.strip("/").startswith(begin) and info["type"] != "directory"
    }


def is_there(url: Url) -> bool:
    """Whether there is an object with this name, or any below it."""
    try:
        return bool(_ask(url, "looking", _info))
    except (FileNotFoundError, NotADirectoryError):
        return False


# ---- writing ----


def put(url: Url, data: bytes) -> None:
    """Write an object, and replace an existing one."""
    _ask(url, "writing", lambda store, name: store.pipe_file(name, data))


def put_new(url: Url, data: bytes) -> None:
    """Create an object. Raises FileExistsError if another one exists.

    Raises OutcomeUnknown if no try was answered and the object does not exist: it may still appear later.
    """
    _settle(url, data, None, lambda store, name: store.pipe_file(name, data, mode="create"))


def put_over(url: Url, data: bytes, before: Seen) -> None:
    """Replace the object `before`. Raises FileExistsError if it has changed since; OutcomeUnknown as `put_new`.

    S3 compares and writes atomically. Elsewhere the object is checked first, so two concurrent writers may succeed.
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
    """Write once, even if answers are lost: after an error, the object is read to see whether it was written."""
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
        except OSError as error:  # also FileExistsError: an earlier try of this write may have succeeded
            failed = error
        try:
            there = _whole(url, len(data))
        except OSError as error:
            failed = error
            continue
        if there == data:
            log.warning("storage: %s: a write had no answer (%s), but succeeded.", url, message_of(failed))
            return
        if is_refusal(failed) or (before is None and there is not None):
            raise FileExistsError(errno.EEXIST, "another process has written it", str(url)) from failed
        log.warning("storage: %s: a write had no answer (%s); trying again.", url, message_of(failed))
        time.sleep(PAUSE_S)
    raise OutcomeUnknown(
        errno.EIO, f"it is unknown whether it was written ({message_of(failed)})", str(url)
    ) from failed


def is_refusal(error: Exception) -> bool:
    """Whether an error means that the condition of a conditional write was not met."""
    return isinstance(error, (FileExistsError, FileNotFoundError)) or "condition" in message_of(error).lower()


def _whole(url: Url, size: int) -> bytes | None:
    try:
        return read(url, size)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EFBIG:
            return b""  # an object with other contents
        raise


def remove(url: Url) -> None:
    """Delete an object, and all objects below its name, if they exist."""
    with suppress(FileNotFoundError):
        _ask(url, "deleting", _remove)


def _remove(store: Any, name: str) -> None:
    """Many at once; one by one where fsspec's rm() would take the name for a pattern, and delete what matches it."""
    if not has_magic(name):
        store.rm(name, recursive=True)
        return
    for found in store.find(name):
        store.rm_file(found)


# ---- capabilities of a store ----


@lru_cache(maxsize=64)
def is_exclusive(folder: Url) -> bool:
    """Whether conditional creation fails if the object exists. Tested once per folder, with a temporary object."""
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
    """A problem that would prevent saves there, found by writing, reading and deleting an object; or None."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        file_system(folder)  # its errors name the folder instead of the probe, so they are equal on all ranks
        put(probe, b"probe")
        found = read(probe, 5)
        remove(probe)
    except ShardkitError as error:
        return str(error)
    except OSError as error:
        what = f"{folder.parts[0]}: no such bucket" if isinstance(error, FileNotFoundError) else None
        return f"storage: {folder}: {reason_of(error, 'written', what)}"
    return None if found == b"probe" else f"storage: {folder}: data read differ from data written; check the store."


def nothing_there(url: Url) -> str | None:
    """Why nothing can be loaded from a URL; None if something exists there."""
    try:
        return None if is_there(url) else f"storage: {url}: no object with this name; check the URL."
    except ShardkitError as error:
        return str(error)
    except OSError as error:
        return f"storage: {url}: {reason_of(error, 'read')}"


def reason_of(error: OSError, verb: str, what: str | None = None) -> str:
    """Why a place in a store cannot be read or written; `what` in place of the error's own reason."""
    if isinstance(error, PermissionError):
        return f"cannot be {verb}: {error.strerror}."  # names the remedy
    return f"cannot be {verb} ({what or error.strerror}); check the URL and the credentials."
