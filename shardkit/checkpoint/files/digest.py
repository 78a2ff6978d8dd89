"""Digests of a checkpoint's bytes: xxh3 (128 bits, against corruption) or sha256 (against tampering as well)."""

import hashlib
from collections.abc import Iterable
from typing import Protocol

import xxhash

from shardkit.checkpoint.files import disk

NAMES = ("xxh3", "sha256")
# Bytes of a file on disk that are read and hashed at a time. They are still in the core's own cache when they are
# hashed: 240 MiB take 30 ms, in blocks of 8 MiB 39 ms.
HASHED_BYTES = 1 << 20


class Digest(Protocol):
    """The part of hashlib's interface that is used here."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new(name: str) -> Digest:
    """A new digest object. `name`: one of NAMES."""
    return xxhash.xxh3_128() if name == "xxh3" else hashlib.sha256()


def of_bytes(name: str, data: bytes) -> str:
    """The digest of some bytes."""
    digest = new(name)
    digest.update(memoryview(data))
    return digest.hexdigest()


def of_range(source: disk.Source, offset: int, length: int, where: str) -> str:
    """The xxh3 digest of a part of a file."""
    digest = new("xxh3")
    feed(digest, source, [(offset, length)], where, scratch(source))
    return digest.hexdigest()


def scratch(source: disk.Source) -> memoryview:
    """Memory for what is read only to be hashed."""
    return memoryview(bytearray(HASHED_BYTES if isinstance(source, int) else disk.BLOCK_BYTES))


def feed(
    digest: Digest, source: disk.Source, ranges: Iterable[tuple[int, int]], where: str, scratch: memoryview
) -> None:
    """Hash (offset, length) ranges of a file; `scratch` is overwritten."""
    for offset, length in ranges:
        for low in range(0, length, len(scratch)):
            block = scratch[: min(len(scratch), length - low)]
            disk.read_into(source, block, offset + low, where)
            digest.update(block)
