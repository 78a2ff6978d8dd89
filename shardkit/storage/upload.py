"""Multipart upload of a large object with bounded memory. The object appears when it is complete, or not at all."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from shardkit.storage import objects
from shardkit.storage.url import Url

# S3 requires parts of at least 5 MiB, and at most 10,000 of them.
PART_BYTES = 16 << 20
PARTS = 9_000

Result = TypeVar("Result")


class Upload:
    """One object, written sequentially. It appears when the `with` block ends without an error.

    `size`: its final size in bytes. `reach` is called with "open", "part" (before each write that fills a part) and
    "close", so that a test can inject faults there.
    """

    def __init__(self, url: Url, size: int, reach: Callable[[str], None] = lambda point: None) -> None:
        self.url, self._reach, self._done = url, reach, 0
        self.part_bytes = max(PART_BYTES, math.ceil(size / PARTS))
        self._file: Any = None

    def __enter__(self) -> "Upload":
        self._reach("open")
        store, name = objects.file_system(self.url)
        self._file = self._try(lambda: store.open(name, "wb", block_size=self.part_bytes))
        return self

    def put(self, data: memoryview, offset: int) -> None:
        """Write the next bytes."""
        assert offset == self._done, "an object is written sequentially"
        if self._done // self.part_bytes != (self._done + len(data)) // self.part_bytes:
            self._reach("part")
        self._try(lambda: self._file.write(data))
        self._done += len(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._drop()
            return
        self._reach("close")
        try:
            self._try(self._file.close)
        except OSError:
            self._drop()
            raise

    def _try(self, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except Exception as error:
            raise objects.refusal(self.url, "writing", error) or objects.failure(self.url, "writing", error) from error

    def _drop(self) -> None:
        """Abort the upload. Otherwise the store keeps the uploaded parts, and charges for them."""
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # otherwise its finalizer would complete the upload


def again(write: Callable[[], Result]) -> Result:
    """The result of `write`, which uploads one object. It is called again if the store fails."""
    for number in range(1, objects.TRIES):
        try:
            return write()
        except PermissionError:
            raise
        except OSError as error:
            objects.wait_after(number, f"{error}; the upload is restarted")
    return write()
