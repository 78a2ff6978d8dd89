"""Byte sizes as text, in binary units."""

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def in_words(size_bytes: int) -> str:
    """`23.6 GiB`: the largest unit of which there is at least one."""
    for unit, size in UNITS:
        if size_bytes >= size:
            return f"{size_bytes / size:,.1f} {unit}"
    return f"{size_bytes} bytes"
