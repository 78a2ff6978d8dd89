"""Byte sizes: as text, and read from text."""

import re

from shardkit.digits import number_in

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))

_READ = {"k": KIB, "m": MIB, "g": GIB, "t": 2**40, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40}
_READ |= {"ki": KIB, "mi": MIB, "gi": GIB, "ti": 2**40}
_READ |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d+)?)\s*([kmgt]i?b?)\s*", re.IGNORECASE)


def in_words(size_bytes: int) -> str:
    """`23.6 GiB`: the largest unit of which there is at least one."""
    for unit, size in UNITS:
        if size_bytes >= size:
            return f"{size_bytes / size:,.1f} {unit}"
    return f"{size_bytes} bytes"


def read_bytes(text: str) -> int | None:
    """The bytes of a size with its unit: 80GiB, 80Gi and 80g (2^30), 24 GB (10^9); None if it is none, or is 0."""
    match = _SIZE.fullmatch(text)
    factor = _READ.get(match[2].lower()) if match else None
    return int(float(match[1]) * factor) or None if match and factor else None


def read_size(text: str) -> int | None:
    """As `read_bytes`; also a number of bytes, with a B: 500B."""
    given = text.strip().upper()
    return (number_in(given[:-1]) if given.endswith("B") else None) or read_bytes(text)
