"""The prompter for a terminal: questionary's lists and lines, with back, help, first-letter keys and wrapped text."""

import shutil
from collections.abc import Sequence
from typing import Any

import questionary
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings
from prompt_toolkit.output import Output
from questionary.prompts.common import InquirerControl

from shardkit.wizard.prompter import Back, Option, Prompt, fit, option_line, wrap

STYLE = questionary.Style([("highlighted", "bold"), ("disabled", "italic"), ("problem", "fg:ansired")])
LOW = 14
"""Terminals with fewer rows than this get the title and the list only; the rest is on `?`."""


class _Help(Exception):
    """`?` was pressed."""


class QuestionaryPrompter:
    """Asks in place: arrows, number keys and first letters move, Enter takes, Esc or Ctrl-B goes back, `?` explains."""

    def __init__(self, input: Input | None = None, output: Output | None = None) -> None:
        self.streams: dict[str, Any] = {} if input is None else {"input": input}
        self.streams |= {} if output is None else {"output": output}

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns

    def say(self, text: str) -> None:
        for line in wrap(text, self.width - 1):
            print(line)

    def choose(self, prompt: Prompt, options: Sequence[Option], default: Any) -> Any:
        def question() -> questionary.Question:
            few = len(options) <= 9
            return questionary.select(
                self._message(prompt),
                choices=self._choices(options, numbered=few),
                default=self._selectable(options, default),
                pointer=">",
                instruction=self._under(prompt, "1-9, arrows, Enter; Esc back; ? help" if few else "arrows, Enter"),
                use_shortcuts=few,
                use_jk_keys=False,
                style=STYLE,
                erase_when_done=True,
                **self.streams,
            )

        return self._ask(question, prompt, options)

    def choose_many(self, prompt: Prompt, options: Sequence[Option], defaults: Sequence[Any]) -> list[Any]:
        def question() -> questionary.Question:
            return questionary.checkbox(
                self._message(prompt),
                choices=self._choices(options, numbered=False, checked=defaults),
                pointer=">",
                instruction=self._under(prompt, "arrows, Space marks, Enter; Esc back; ? help"),
                use_jk_keys=False,
                style=STYLE,
                erase_when_done=True,
                **self.streams,
            )

        return self._ask(question, prompt, ())

    def text(self, prompt: Prompt, default: str) -> str:
        def question() -> questionary.Question:
            usual = f" [{default}]" if default else ""
            problem = "".join(f"\n{line}" for line in wrap(f"! {prompt.problem}", self.width - 3, "  "))
            caret = f"{problem if prompt.problem else ''}\n  >"
            lines = "" if _rows() < LOW else self._under(prompt, "")
            return questionary.text(
                f"{self._message(prompt)}{usual}{lines}{caret}", style=STYLE, erase_when_done=True, **self.streams
            )

        return self._ask(question, prompt, ()).strip() or default

    def _message(self, prompt: Prompt) -> str:
        return "\n".join(wrap(prompt.title, self.width - 4)).strip()

    def _under(self, prompt: Prompt, keys: str) -> str:
        lines = [] if _rows() < LOW else [line for text in prompt.lines for line in wrap(text, self.width - 1, "  ")]
        if keys and self.width < 60:
            keys = "arrows, Enter; Esc back; ? help"
        keys = f"({keys})" if keys else ""
        if keys and len(prompt.title) + len(keys) + 4 > self.width:
            keys = f"\n  {fit(keys, self.width - 3)}"
        return keys + "".join(f"\n{line}" for line in lines)

    def _choices(
        self, options: Sequence[Option], numbered: bool, checked: Sequence[Any] = ()
    ) -> list[questionary.Choice]:
        width = max((len(option.label) for option in options if option.consequence or option.disabled), default=0)
        choices = []
        for number, option in enumerate(options, start=1):
            line = option_line(option, width)
            if option.disabled:
                line = f"{number}) " * numbered + f"{option.label}: {option.disabled}"
            choices.append(
                questionary.Choice(
                    fit(line, self.width - 7),
                    value=option.value,
                    disabled=bool(option.disabled) or None,  # type: ignore[arg-type]
                    checked=option.value in checked,
                    shortcut_key=str(number) if numbered else None,
                )
            )
        return choices

    @staticmethod
    def _selectable(options: Sequence[Option], default: Any) -> Any:
        possible = [option.value for option in options if not option.disabled]
        return default if default in possible else possible[0]

    def _ask(self, question: Any, prompt: Prompt, options: Sequence[Option]) -> Any:
        while True:
            asked = question()
            _prepare(asked, options)
            try:
                return asked.unsafe_ask()
            except _Help:
                self.say("\n".join(f"  {line}" for line in _help_lines(prompt)))
            except EOFError:
                raise KeyboardInterrupt from None


def _rows() -> int:
    return shutil.get_terminal_size().lines


def _help_lines(prompt: Prompt) -> list[str]:
    lines = (prompt.help or "There is no more to say about this one.").splitlines()
    return [*lines, *(line for line in prompt.lines if line.strip())] if _rows() < LOW else lines


def _prepare(question: questionary.Question, options: Sequence[Option]) -> None:
    """Add back, help and first-letter keys to a question. Esc must not wait a second for a key that follows."""
    application = question.application
    application.ttimeoutlen = 0.1
    application.timeoutlen = 0.1
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
        if not lists and event.app.current_buffer.text:
            event.app.current_buffer.insert_text("?")
        else:
            event.app.exit(exception=_Help())

    if lists:
        _bind_first_letters(bindings, lists[0], options)
    present = [application.key_bindings] if application.key_bindings else []
    application.key_bindings = merge_key_bindings([*present, bindings])


def _bind_first_letters(bindings: KeyBindings, control: InquirerControl, options: Sequence[Option]) -> None:
    """`y` moves to yes, `b` to bf16, ...: where one option only begins with that letter."""
    firsts = [option.label[:1].lower() for option in options]
    for index, (letter, option) in enumerate(zip(firsts, options, strict=True)):
        if not letter.isalpha() or option.disabled or firsts.count(letter) > 1:
            continue

        def move(event: Any, index: int = index) -> None:
            control.pointed_at = index

        bindings.add(letter)(move)
        bindings.add(letter.upper())(move)
