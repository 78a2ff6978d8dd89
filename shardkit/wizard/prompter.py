"""Prompters: in-place prompts with arrow and number keys, or plain numbered lines."""

import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from shardkit.digits import number_in

TABLE = " " * 8
"""A line with this indentation belongs to a table."""
NO_HELP = "There is no help for this question."
BACK_WORDS = {"b", "back", "<"}


class Back(Exception):
    """The user wants the previous question."""


@dataclass(frozen=True)
class Option:
    """One option of a list. `disabled`: why it cannot be chosen, or ""."""

    value: Any
    label: str
    consequence: str = ""
    disabled: str = ""


@dataclass(frozen=True)
class Prompt:
    """The texts of a question: title, lines below it (a table's head, a hint), a problem with the last answer, the help
    for `?`, and the default with its reason (`enter`)."""

    title: str
    lines: tuple[str, ...] = ()
    problem: str = ""
    help: str = ""
    enter: str = ""


class Prompter(Protocol):
    """Asks one question. Every method raises Back for the previous question, KeyboardInterrupt to stop."""

    def say(self, text: str) -> None:
        """Prints lines, wrapped to the screen."""

    def choose(self, prompt: Prompt, options: Sequence[Option], default: Any) -> Any:
        """The value of one option; `default` is preselected."""

    def choose_many(self, prompt: Prompt, options: Sequence[Option], defaults: Sequence[Any]) -> list[Any]:
        """The values of the chosen options."""

    def text(self, prompt: Prompt, default: str) -> str:
        """The typed text, stripped; `default` if it is empty."""

    def waiting(self, text: str) -> AbstractContextManager[None]:
        """Shows what is being waited for."""


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """The text in lines of at most `width`; lines of a table are cut, not wrapped."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        if len(indent + line) <= width or line.startswith(TABLE):
            lines.append(fit(indent + line, width))
            continue
        inner = indent + " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(line.strip(), max(12, width), initial_indent=inner, subsequent_indent=inner + "  ")
    return lines


def fit(line: str, width: int) -> str:
    """The line, cut to `width` with three dots."""
    return line if len(line) <= width else line[: max(1, width - 3)].rstrip() + "..."


def option_line(option: Option, label_width: int) -> str:
    """`label   consequence`, aligned."""
    if not option.consequence:
        return option.label
    return f"{option.label:<{label_width}}  {option.consequence}"


def label_width(options: Sequence[Option]) -> int:
    """The width of the label column."""
    return max((len(option.label) for option in options if option.consequence or option.disabled), default=0)


class PlainPrompter:
    """Numbered lines and input(), without redraw or colour, ASCII only: for screen readers, dumb terminals and logs."""

    keys_text = "b: back, ?: help, Ctrl-C: stop"

    def __init__(self, width: int = 80, read: Callable[[str], str] = input) -> None:
        self.width = width
        self.read = read

    def say(self, text: str) -> None:
        for line in wrap(_ascii(text), self.width):
            print(line)

    def choose(self, prompt: Prompt, options: Sequence[Option], default: Any) -> Any:
        self._show(prompt)
        self._list(options, lambda option: "(default)" if option.value == default else "")
        usual = next(n for n, option in enumerate(options, start=1) if option.value == default)
        while True:
            typed = self._read(prompt, f"Choice [{usual}]: ", str(usual))
            found = _find(options, typed)
            if isinstance(found, Option):
                return found.value
            self.say(f"  ! {found}")

    def choose_many(self, prompt: Prompt, options: Sequence[Option], defaults: Sequence[Any]) -> list[Any]:
        self._show(prompt)
        self._list(options, lambda option: "(chosen)" if option.value in defaults else "")
        usual = ", ".join(str(n) for n, option in enumerate(options, start=1) if option.value in defaults) or "none"
        while True:
            typed = self._read(prompt, f"Choices, with commas [{usual}]: ", usual)
            words = [] if typed.lower() == "none" else [word.strip() for word in typed.split(",") if word.strip()]
            found = [_find(options, word) for word in words]
            problems = [item for item in found if isinstance(item, str)]
            if not problems:
                return [item.value for item in found if isinstance(item, Option)]
            self.say(f"  ! {problems[0]}")

    def text(self, prompt: Prompt, default: str) -> str:
        self._show(prompt)
        if prompt.problem:
            self.say(f"  ! {prompt.problem}")
        return self._read(prompt, f"Answer [{default}]: " if default else "Answer: ", default)

    def waiting(self, text: str) -> AbstractContextManager[None]:
        self.say(f"  {text} ...")
        return nullcontext()

    def _show(self, prompt: Prompt) -> None:
        print()
        self.say(prompt.title)
        for line in (prompt.enter, *prompt.lines):
            if line:
                self.say(f"  {line}")

    def _list(self, options: Sequence[Option], mark: Callable[[Option], str]) -> None:
        width, digits = label_width(options), len(str(len(options)))
        for number, option in enumerate(options, start=1):
            reason = f"(not possible: {option.disabled})" if option.disabled else mark(option)
            self.say(f"  {number:>{digits}}. {option_line(option, width)} {reason}".rstrip())

    def _read(self, prompt: Prompt, caret: str, default: str) -> str:
        while True:
            try:
                typed = self.read(caret).strip()
            except (EOFError, KeyboardInterrupt):
                print()  # what is said next begins a line
                raise KeyboardInterrupt from None
            if typed in {"?", "help"}:
                self.say(f"{prompt.help or NO_HELP} ({self.keys_text})")
                continue
            if typed.lower() in BACK_WORDS:
                raise Back
            return typed or default


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def _find(options: Sequence[Option], typed: str) -> Option | str:
    """The option of that number, label or label prefix; else the error text."""
    found = _matching(options, typed)
    if found is None:
        numbers = f"1 to {len(options)}" if len(options) > 1 else "1"
        return f"not among the choices (got {typed!r}); enter {numbers}, or the first letters of a choice."
    return f"{found.label} is not possible: {found.disabled}." if found.disabled else found


def _matching(options: Sequence[Option], typed: str) -> Option | None:
    number = number_in(typed)
    if number is not None and 1 <= number <= len(options):
        return options[number - 1]
    word = typed.lower()
    exact = [option for option in options if word in {option.label.lower(), _first_word(option)}]
    close = exact or [option for option in options if word and option.label.lower().startswith(word)]
    return close[0] if len(close) == 1 else None


def _first_word(option: Option) -> str:
    return (option.label.split() or [""])[0].lower().rstrip(":,")
