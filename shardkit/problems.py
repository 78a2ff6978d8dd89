"""Collects problems of flags and files, so that a command reports all of them at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from shardkit.errors import ConfigError, UsageError
from shardkit.wording import counted

T = TypeVar("T")


@dataclass
class Problems:
    """One line per problem, in the order in which they were found."""

    lines: list[str] = field(default_factory=list)

    def add(self, text: str | None) -> None:
        """Add problems, one per line; None: no problem."""
        self.lines += (text or "").splitlines()

    def of(self, read: Callable[..., T], *arguments: object) -> T | None:
        """The result of `read`; None if it raises, and its problems are added."""
        try:
            return read(*arguments)
        except (UsageError, ConfigError) as error:
            self.add(str(error))
            return None

    def raise_all(self, consequence: str = "") -> None:
        """Raises ConfigError with all problems, if there are any, and then their number and the consequence."""
        if not self.lines:
            return
        lines = list(dict.fromkeys(self.lines))
        end = [f"{counted(len(lines), 'error')}. {consequence}"] if consequence else []
        raise ConfigError([*lines, *end])
