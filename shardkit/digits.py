"""Numbers in text from outside: flags, environment variables, files of other programs."""

import re
from collections.abc import Mapping

from shardkit.errors import UsageError

UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+\D?")
"""A number with commas between thousands. Other commas are slips: a decimal comma (0,5), a list of GPUs (0,1)."""
_EXACT_DIGITS = 30  # floating-point numbers hold 15
_DIGITS = re.compile(r"\s*([0-9]{1,18})\s*")


def number_in(text: str) -> int | None:
    """The number of a text that consists of ASCII digits, with spaces around them or not; None for any other text.

    At most 18 digits: more than anything here counts, and what fits 64 bits. `str.isdigit` is no such test: it accepts
    `²`, which `int` refuses, as it refuses 4,301 digits.
    """
    found = _DIGITS.fullmatch(text)
    return None if found is None else int(found[1])


def count_in(text: str, units: Mapping[str, int] = UNITS) -> int | None:
    """100000000 of "1e8", "100M", "100_000_000" and "100,000,000"; None for any other text, and for what is no whole
    number. `units`: the number for each letter."""
    text = text.strip().lower().replace("_", "")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    factor = units.get(text[-1:], 1)
    text = text[:-1] if factor > 1 else text
    if text.isascii() and text.isdigit() and len(text) <= _EXACT_DIGITS:
        return int(text) * factor
    number = decimal_in(text)
    return int(number * factor) if number is not None and (number * factor).is_integer() else None


def decimal_in(text: str) -> float | None:
    """The floating-point number of a text; None for any other text."""
    try:
        return float(text)
    except ValueError:
        return None


def number_of_flag(flag: str, text: str | None, least: int = 1, most: int = 10**9) -> int | None:
    """The number that was given to a flag; None: not given. Raises UsageError where it is not from `least` to `most`,
    beyond which it is a slip, and products of such numbers are beyond floating-point ones."""
    number = None if text is None else number_in(text)
    if text is not None and (number is None or not least <= number <= most):
        raise UsageError(f"{flag}: is not a whole number from {least:,} to {most:,} (got {text!r}); give one.")
    return number
