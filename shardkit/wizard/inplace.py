"""The prompter for a terminal: questionary prompts with back, help, first-letter keys and wrapped text."""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import questionary
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.output import Output
from questionary.prompts.common import InquirerControl

from shardkit.spinner import waiting
from shardkit.wizard.prompter import NO_HELP, Back, Option, Prompt, fit, label_width, option_line, wrap

STYLE = questionary.Style([("highlighted", "bold"), ("disabled", "italic"), ("problem", "fg:ansired")])
LOW = 14
"""Terminals with fewer rows than this show only the title and the list; the rest is shown by `?`."""
NARROWEST = 24
"""A column of text narrower than this is placed below the labels instead of next to them."""
KEYS = "arrows, numbers or letters, Enter; Esc back; ? help"


@dataclass(frozen=True)
class _Place:
    """The state of a question: the selected option, and the marked ones."""

    pointed: Any = None
    marked: Sequence[Any] = ()


class _Help(Exception):
    """`?` was pressed."""

    def __init__(self, place: _Place) -> None:
        self.place = place


class QuestionaryPrompter:
    """Asks in place: arrows, numbers and first letters move, Enter accepts, Esc or Ctrl-B goes back, `?` shows help."""

    def __init__(self, input: Input | None = None, output: Output | None = None) -> None:
        self.streams: dict[str, Any] = {} if input is None else {"input": input}
        self.streams |= {} if output is None else {"output": output}

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns

    def say(self, text: str) -> None:
        for line in wrap(text, self.width - 1):
            print(line)

    def waiting(self, text: str) -> AbstractContextManager[None]:
        return waiting(text)

    def choose(self, prompt: Prompt, options: Sequence[Option], default: Any) -> Any:
        few = len(options) <= 9

        def question(before: _Place) -> questionary.Question:
            return questionary.select(
                self._message(prompt),
                choices=self._choices(options, prompt, numbered=few),
                default=self._selectable(options, before.pointed),
                pointer=">",
                instruction=self._under(prompt, KEYS if few else "arrows or letters, Enter; Esc back; ? help"),
                use_shortcuts=few,
                use_jk_keys=False,
                style=STYLE,
                erase_when_done=True,
                **self.streams,
            )

        return self._ask(question, prompt, options, _Place(default))

    def choose_many(self, prompt: Prompt, options: Sequence[Option], defaults: Sequence[Any]) -> list[Any]:
        def question(before: _Place) -> questionary.Question:
            return questionary.checkbox(
                self._message(prompt),
                choices=self._choices(options, prompt, numbered=False, checked=before.marked),
                initial_choice=before.pointed,
                pointer=">",
                instruction=self._under(prompt, "arrows, Space marks, Enter; Esc back; ? help"),
                use_jk_keys=False,
                style=STYLE,
                erase_when_done=True,
                **self.streams,
            )

        return self._ask(question, prompt, options, _Place(options[0].value, defaults))

    def text(self, prompt: Prompt, default: str) -> str:
        def question(before: _Place) -> questionary.Question:
            lines = [prompt.enter or (f"Enter takes {default}" if default else "")]
            lines += [] if _rows() < LOW else prompt.lines
            lines += [f"! {prompt.problem}"] if prompt.problem else []
            under = "".join(f"\n{part}" for line in lines if line for part in wrap(line, self.width - 3, "  "))
            message = f"{self._message(prompt)}{under}\n  >"
            return questionary.text(message, style=STYLE, erase_when_done=True, **self.streams)

        return self._ask(question, prompt, (), _Place()).strip() or default

    def _message(self, prompt: Prompt) -> str:
        return "\n".join(wrap(prompt.title, self.width - 4)).strip()

    def _under(self, prompt: Prompt, keys: str) -> str:
        wanted = [] if _rows() < LOW else [line for line in (prompt.enter, *prompt.lines) if line]
        lines = [part for text in wanted for part in wrap(text, self.width - 1, "  ")]
        if self.width < 60:
            keys = "arrows, Enter; Esc back; ? help"
        keys = f"({keys})"
        if len(prompt.title) + len(keys) + 4 > self.width:
            keys = f"\n  {fit(keys, self.width - 3)}"
        return keys + "".join(f"\n{line}" for line in lines)

    def _choices(
        self, options: Sequence[Option], prompt: Prompt, numbered: bool, checked: Sequence[Any] = ()
    ) -> list[questionary.Choice]:
        """The options, fitted to the terminal: text next to the labels, wrapped, or only the selected option's text,
        below."""
        lines = [_line(option, options, number, numbered) for number, option in enumerate(options, start=1)]
        room = self.width - 7
        descriptions: list[str | None] = [None] * len(options)
        if any(len(line) > room for line in lines):
            wrapped = [_wrapped(option, options, line, room) for option, line in zip(options, lines, strict=True)]
            rows = sum(line.count("\n") + 1 for line in wrapped)
            if rows + 3 <= _rows() or len(options) + 5 > _rows():
                lines = wrapped
            else:
                descriptions = [self._description(option) for option in options]
                lines = [w if option.disabled else option.label for option, w in zip(options, wrapped, strict=True)]
        return [
            questionary.Choice(
                line,
                value=option.value,
                disabled=bool(option.disabled) or None,  # type: ignore[arg-type]
                checked=option.value in checked,
                shortcut_key=str(number) if numbered else None,
                description=description,
            )
            for number, (option, line, description) in enumerate(
                zip(options, lines, descriptions, strict=True), start=1
            )
        ]

    def _description(self, option: Option) -> str:
        return "\n".join(wrap(option.consequence, self.width - 18)).replace("\n", "\n  ")

    @staticmethod
    def _selectable(options: Sequence[Option], default: Any) -> Any:
        possible = [option.value for option in options if not option.disabled]
        return default if default in possible else possible[0]

    def _ask(
        self,
        question: Callable[[_Place], questionary.Question],
        prompt: Prompt,
        options: Sequence[Option],
        before: _Place,
    ) -> Any:
        while True:
            asked = question(before)
            _prepare(asked, options)
            try:
                return asked.unsafe_ask()
            except _Help as help:
                before = help.place
                self._explain(prompt)
            except EOFError:
                raise KeyboardInterrupt from None

    def _explain(self, prompt: Prompt) -> None:
        """Shows the help in place of the question, page by page."""
        lines = [part for line in _help_lines(prompt) for part in wrap(line, self.width - 3)]
        page = max(3, _rows() - 3)
        for start in range(0, len(lines), page):
            text = "\n ".join([*lines[start : start + page], "(press any key)"])
            shown = questionary.press_any_key_to_continue(text, erase_when_done=True, **self.streams)
            shown.application.ttimeoutlen = 0.1
            shown.unsafe_ask()


def _rows() -> int:
    return shutil.get_terminal_size().lines


def _line(option: Option, options: Sequence[Option], number: int, numbered: bool) -> str:
    if option.disabled:
        return f"{number}) " * numbered + f"{option.label}: {option.disabled}"
    return option_line(option, label_width(options))


def _wrapped(option: Option, options: Sequence[Option], line: str, room: int) -> str:
    """The line, wrapped, with its text in a separate column."""
    column = label_width(options) + 2
    if option.disabled or not option.consequence:
        return "\n".join(textwrap.wrap(line, room, subsequent_indent=" " * 8))
    if room - column >= NARROWEST:
        parts = textwrap.wrap(option.consequence, room - column)
        return f"{option.label:<{column}}" + ("\n" + " " * (column + 6)).join(parts)
    parts = textwrap.wrap(option.consequence.strip(), room - 2)
    return ("\n" + " " * 8).join([option.label, *parts])


def _help_lines(prompt: Prompt) -> list[str]:
    lines = (prompt.help or NO_HELP).splitlines()
    return [*lines, *(line for line in (prompt.enter, *prompt.lines) if line.strip())] if _rows() < LOW else lines


def _prepare(question: questionary.Question, options: Sequence[Option]) -> None:
    """Adds back, help and first-letter keys to a question. Esc must not wait for a following key."""
    application = question.application
    application.ttimeoutlen = 0.1
    application.timeoutlen = 0.1
    leave = application.exit

    def leave_once(**how: Any) -> None:
        if not application.is_done:  # Esc and Ctrl-C within the timeout are handled together, and both leave
            leave(**how)

    application.exit = leave_once  # type: ignore[method-assign]
    bindings = KeyBindings()
    controls = [window.content for window in application.layout.find_all_windows()]
    lists = [control for control in controls if isinstance(control, InquirerControl)]

    @bindings.add("escape")
    @bindings.add("c-b", eager=True)
    def back(event: Any) -> None:
        event.app.exit(exception=Back())

    @bindings.add("c-d", eager=True)
    def stop(event: Any) -> None:
        event.app.exit(exception=EOFError())

    @bindings.add("?", eager=True)
    def explain(event: Any) -> None:
        if lists:
            marked = [choice.value for choice in lists[0].get_selected_values()]
            event.app.exit(exception=_Help(_Place(lists[0].get_pointed_at().value, marked)))
        elif event.app.current_buffer.text:
            event.app.current_buffer.insert_text("?")
        else:
            event.app.exit(exception=_Help(_Place()))

    if lists:
        _bind_first_letters(bindings, lists[0], options)
    present = [application.key_bindings] if application.key_bindings else []
    application.key_bindings = merge_key_bindings([*present, bindings])


def _bind_first_letters(bindings: KeyBindings, control: InquirerControl, options: Sequence[Option]) -> None:
    """`y` moves to yes, `b` to bf16, ...: to the next option that begins with the letter, cyclically."""
    places: dict[str, list[int]] = {}
    for index, option in enumerate(options):
        letter = option.label[:1].lower()
        if letter.isalpha() and not option.disabled:
            places.setdefault(letter, []).append(index)
    for letter, indices in places.items():

        def move(event: Any, indices: list[int] = indices) -> None:
            after = [index for index in indices if index > control.pointed_at]
            control.pointed_at = (after or indices)[0]

        bindings.add(letter)(move)
        bindings.add(letter.upper())(move)
