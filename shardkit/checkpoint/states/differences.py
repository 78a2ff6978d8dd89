"""What a checkpoint and the live objects do not have in common. A strict load refuses it; others leave it as it is."""

from dataclasses import dataclass

from shardkit.wording import first_few

KEEP = "load with strict=False to keep it unchanged"
LEAVE_OUT = "load with strict=False to leave it out"
TAKE_SAVED = "load with strict=False to give all of them the saved settings"


@dataclass(frozen=True)
class Difference:
    """One difference, and what to do about it."""

    text: str
    advice: str

    @property
    def as_problem(self) -> str:
        """The line of a refused load."""
        return f"{self.text}; {self.advice}"


def listed(section: str, what: str, names: list[str], advice: str) -> list[Difference]:
    """One difference with the first names, or none if there are no names."""
    return [Difference(f"{section}: {what}: {first_few(names, 5)}", advice)] if names else []
