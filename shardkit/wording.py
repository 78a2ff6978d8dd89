"""Counts and lists in messages: `1 rank`, `3 ranks`; `a, b and 4 more`."""

from collections.abc import Iterable


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `3 ranks`; `plural`: of a noun that does not just take an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def first_few(names: Iterable[object], most: int) -> str:
    """The names with commas; `a, b and 4 more` where there are more than `most`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
