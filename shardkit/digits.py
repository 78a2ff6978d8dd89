"""Whole numbers in text from outside: flags, environment variables, files of other programs."""

import re

from shardkit.errors import UsageError

_DIGITS = re.compile(r"\s*([0-9]{1,18})\s*")


def number_in(text: str) -> int | None:
    """The number of a text that consists of ASCII digits, with spaces around them or not; None for any other text.

    At most 18 digits: more than anything here counts, and what fits 64 bits. `str.isdigit` is no such test: it accepts
    `²`, which `int` refuses, as it refuses 4,301 digits.
    """
    found = _DIGITS.fullmatch(text)
    return None if found is None else int(found[1])


def number_of_flag(flag: str, text: str | None, least: int = 1, most: int = 10**9) -> int | None:
    """The number that was given to a flag; None: not given. Raises UsageError where it is not from `least` to `most`,
    beyond which it is a slip, and products of such numbers are beyond floating-point ones."""
    number = None if text is None else number_in(text)
    if text is not None and (number is None or not least <= number <= most):
        raise UsageError(f"{flag}: is not a whole number from {least:,} to {most:,} (got {text!r}); give one.")
    return number
