"""Counts, lists, ranks and errors in messages: `1 rank`, `3 ranks`; `6.74 B`; `a, b and 4 more`; near misses."""

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 rank`, `3 ranks`; `plural`: of a noun that does not just take an s."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def count_text(number: int) -> str:
    """A count in short form: 6.74 B, 124 M, 8,192."""
    if number < 10**6:
        return f"{number:,}"
    rounded = float(f"{number:.3g}")  # first: 999,999,999 are 1 B
    factor, unit = next(one for one in ((10**12, "T"), (10**9, "B"), (10**6, "M")) if rounded >= one[0])
    value = rounded / factor
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def first_few(names: Iterable[object], most: int) -> str:
    """The names with commas; `a, b and 4 more` where there are more than `most`."""
    texts = [str(name) for name in names]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


def near_or(name: str, known: Iterable[str], otherwise: str) -> str:
    """`did you mean NAME?` of the known name that is nearest, or what else to do where none is near."""
    from difflib import get_close_matches  # an error alone needs it

    near = get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else otherwise


def ranks_text(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 1, 2, 5`; at most eight are listed."""
    return ("rank " if len(numbers) == 1 else "ranks ") + first_few(numbers, 8)


def words(error: Exception) -> str:
    """The text of an error; for an OSError, the reason and the path."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or repr(error)
