"""What a question is: its key, its title, when it applies, what can be answered, and what Enter takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.config.descriptions import text_of
from shardkit.config.keys import all_keys
from shardkit.wizard.prompter import Option
from shardkit.wizard.situation import Situation


@dataclass(frozen=True)
class Default:
    """What Enter takes, and why."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Question:
    """One thing to ask."""

    key: str
    title: str
    default: Callable[[Situation], Default]
    kind: Literal["choose", "several", "text"] = "text"
    options: Callable[[Situation], Sequence[Option]] = lambda s: ()
    check: Callable[[Situation, str], Any] = lambda s, typed: typed
    """The answer that typed text stands for; raises ValueError with what is wrong and what to do."""
    applies: Callable[[Situation], bool] = lambda s: True
    asked: Callable[[Situation], bool] = lambda s: True
    """Whether it is one of the screens on the way to the review; the others are under "Advanced" there."""
    lines: Callable[[Situation], Sequence[str]] = lambda s: ()
    note: Callable[[Situation, Any], str] = lambda s, value: ""
    when: str = "always"
    help_text: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """The question in a few words: what stands before its answer."""
        return self.label or self.key.rpartition(".")[2].replace("_", " ")

    @property
    def help(self) -> str:
        """What `?` shows: the setting's own text, and what the question adds."""
        key = next((key for key in all_keys().values() if key.name == self.key), None)
        own = f"{key.yaml_name}: {text_of(key.section, key.path[-1])}" if key else ""
        return "\n".join(text for text in (own, self.help_text) if text)


def show(value: Any) -> str:
    """An answer as a person reads it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def always(value: Any, reason: str) -> Callable[[Situation], Default]:
    """A default that depends on nothing."""
    return lambda s: Default(value, reason)
