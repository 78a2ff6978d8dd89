"""Digests of a checkpoint's bytes: xxh3 (128 bits, against corruption) or sha256 (against tampering as well)."""

import hashlib
from collections.abc import Iterable
from typing import Protocol

import xxhash

from shardkit.checkpoint import disk

NAMES = ("xxh3", "sha256")


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


def of_ranges(name: str, source: disk.Source, ranges: Iterable[tuple[int, int]], where: str) -> str:
    """The digest of (offset, length) ranges of a file, one after another."""
    digest = new(name)
    buffer = memoryview(bytearray(disk.BLOCK_BYTES))
    for offset, length in ranges:
        while length:
            block = buffer[: min(length, len(buffer))]
            disk.read_into(source, block, offset, where)
            digest.update(block)
            offset, length = offset + len(block), length - len(block)
    return digest.hexdigest()
