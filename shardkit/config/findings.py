"""What checks of a configuration find."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A problem or note, and its settings by their names in Python."""

    keys: tuple[str, ...]
    text: str
