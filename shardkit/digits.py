"""Whole numbers in text from outside: flags, environment variables, files of other programs."""

import re

_DIGITS = re.compile(r"\s*([0-9]{1,18})\s*")


def number_in(text: str) -> int | None:
    """The number of a text that consists of ASCII digits, with spaces around them or not; None for any other text.

    At most 18 digits: more than anything here counts, and what fits 64 bits. `str.isdigit` is no such test: it accepts
    `²`, which `int` refuses, as it refuses 4,301 digits.
    """
    found = _DIGITS.fullmatch(text)
    return None if found is None else int(found[1])
