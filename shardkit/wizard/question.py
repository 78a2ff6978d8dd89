"""The record of a question: key, title, condition, options, and default."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardkit.config.descriptions import text_of
from shardkit.config.keys import all_keys
from shardkit.wizard import conditions
from shardkit.wizard.prompter import Option
from shardkit.wizard.situation import Situation


@dataclass(frozen=True)
class Default:
    """A default answer and its reason."""

    value: Any
    reason: str


def no_options(situation: Situation) -> Sequence[Option]:
    """Of a question whose answer is typed."""
    return ()


@dataclass(frozen=True)
class Question:
    """One question."""

    key: str
    title: str
    default: Callable[[Situation], Default]
    options: Callable[[Situation], Sequence[Option]] = no_options
    takes_several: bool = False
    """Whether several options may be chosen, and others typed."""
    read: Callable[[Situation, str], Any] = lambda s, typed: typed
    """Converts typed text into an answer; raises ValueError with what is wrong and what to do."""
    applies: Callable[[Situation], bool] = lambda s: True
    asked: Callable[[Situation], bool] = lambda s: True
    """Whether it is asked before the review; the others are in its "Advanced" menu."""
    lines: Callable[[Situation], Sequence[str]] = lambda s: ()
    note: Callable[[Situation, Any], str] = lambda s, value: ""
    when: str = ""
    """In words, when it is asked; where not given, those of `applies`."""
    help_text: str = ""
    label: str = ""

    @property
    def kind(self) -> Literal["choose", "several", "text"]:
        return "text" if self.options is no_options else "several" if self.takes_several else "choose"

    @property
    def asked_when(self) -> str:
        """In words, when it is asked."""
        return self.when or conditions.WORDS.get(self.applies, "always")

    @property
    def name(self) -> str:
        """A short name of the question, shown before its answer."""
        return self.label or self.key.rpartition(".")[2].replace("_", " ")

    @property
    def help(self) -> str:
        """The help for `?`: the setting's description, and the question's help text."""
        key = next((key for key in all_keys().values() if key.name == self.key), None)
        own = f"{key.yaml_name}: {text_of(key.section, key.path[-1])}" if key else ""
        return "\n".join(text for text in (own, self.help_text) if text)


def show(value: Any) -> str:
    """An answer as text."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def always(value: Any, reason: str) -> Callable[[Situation], Default]:
    """A default that does not depend on the situation."""
    return lambda s: Default(value, reason)
