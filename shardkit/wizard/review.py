"""The review: shows the file to be written, with warnings at its lines; save it, or change something first."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardkit.config import checks, edit, files
from shardkit.config.keys import all_keys
from shardkit.config.schema import Config
from shardkit.errors import ConfigError
from shardkit.model import comment
from shardkit.wizard import numbers
from shardkit.wizard.answers import answer_of, to_config
from shardkit.wizard.loop import Conversation, ask_one, shown
from shardkit.wizard.prompter import Back, Option, Prompt
from shardkit.wizard.question import Question
from shardkit.wizard.situation import Situation

Choice = Literal["save", "change", "advanced", "elsewhere", "quit"]
_LONGEST_NAME_BYTES = 255  # NAME_MAX of Linux and macOS


@dataclass(frozen=True)
class Target:
    """The file to write, and its current text (None: a new file)."""

    path: Path
    former: str | None = None
    dry_run: bool = False
    seen: bytes | None = None
    """The content that the file had when the user chose to write it; None: there was no file."""

    @property
    def is_changed(self) -> bool:
        """Whether something else has written the file since then."""
        return not self.dry_run and content_of(self.path) not in (self.seen, None)

    @property
    def shown(self) -> str:
        """The path, relative to the working folder if possible."""
        try:
            return f"./{self.path.resolve().relative_to(Path.cwd())}"
        except ValueError:
            return str(self.path)


def review(session: Conversation, target: Target) -> Target | None:
    """Shows the file and applies changes until it is saved. Returns the saved file, or None if the user quit."""
    while True:
        config = to_config(session.situation())
        text = file_text(config, session, target)
        _show(session, config, text, target)
        choice = _choose(session, config, target)
        match choice:
            case "save":
                if target.is_changed and not _overwrites(session, target.shown, "was changed meanwhile"):
                    continue
                if not (problem := save(text, target)):
                    return target
                session.prompter.say(f"! {problem}")
            case "change":
                _menu(session, "Which answer?", advanced=False)
            case "advanced":
                _menu(session, "Which setting?", advanced=True)
            case "elsewhere":
                target = _elsewhere(session, target)
            case "quit":
                return None


def file_text(config: Config, session: Conversation, target: Target) -> str:
    """The file's text: an edited one keeps its comments and order, a new one has the schema's."""
    text = files.dump(config, path=Path(target.shown)) if target.former is None else edit.edited(target.former, config)
    spec = session.given.get("model")
    return text if spec is None else comment.write(text, spec)


def save(text: str, target: Target) -> str:
    """Writes the file; an existing one is kept as .bak. A dry run prints it instead. Returns the problem, or ""."""
    if target.dry_run:
        print(text, end="")
        return ""
    try:
        files.make_folder_of(target.path)
        files.replace_text(text, target.path)
    except ConfigError as error:
        return str(error)
    return ""


def _show(session: Conversation, config: Config, text: str, target: Target) -> None:
    say = session.prompter.say
    say("")
    if target.former is not None:
        before, after = target.former.splitlines(), text.splitlines()
        changes = list(difflib.unified_diff(before, after, "now", "after saving", lineterm="", n=1))
        say("\n".join(changes) if changes else "Nothing is changed.")
        if edit.edited_by_line(target.former, config) is None:
            say("! It cannot be changed line by line, so it is written anew, without its comments.")
        findings = [*checks.problems(config), *checks.notes(config)]
        say("\n".join(f"  ! {_yaml_name(finding)}: {finding.text}" for finding in findings) if findings else "")
    else:
        say(f"{target.shown} will contain (with a comment above each key):")
        say(annotated(config))
    for line in numbers.review_lines(session.situation(), config):
        say(f"  {line}")


def annotated(config: Config) -> str:
    """The YAML without comments, with each warning below its line."""
    findings = [*checks.problems(config), *checks.notes(config)]
    lines = []
    for line in files.dump(config, comments=False).splitlines():
        lines.append(f"  {line}")
        key = line.strip().partition(":")[0]
        indent = " " * (len(line) - len(line.lstrip()))
        lines += [f"  {indent}^ {f.text}" for f in findings if _yaml_name(f).rpartition(".")[2] == key]
    return "\n".join(lines)


def _yaml_name(finding: checks.Finding) -> str:
    return all_keys()[tuple(finding.keys[0].split("."))].yaml_name


def _choose(session: Conversation, config: Config, target: Target) -> Choice:
    wrong = "the settings contradict each other, see above" if checks.problems(config) else ""
    save = "Print it (dry run)" if target.dry_run else f"Save to {target.shown}"
    advanced = [question.name for question, _ in _listed(session, advanced=True)]
    options = (
        Option("save", save, disabled=wrong),
        Option("change", "Change an answer..."),
        Option("advanced", "Advanced...", _some(advanced)),
        Option("elsewhere", "Another file name..."),
        Option("quit", "Quit without saving"),
    )
    try:
        prompt = Prompt(
            "What now?", help="Advanced settings, which most runs leave at their default: " + ", ".join(advanced)
        )
        return session.prompter.choose(prompt, options, "change" if wrong else "save")
    except Back:
        return "change"


def _some(names: list[str]) -> str:
    """A few of the names, the most common ones first."""
    wanted = ("offload params", "auto wrap policy", "compile", "seed")
    first = [name for name in wanted if name in names] or names[:3]
    return ", ".join([*first, "..."] if len(names) > len(first) else first)


def _listed(session: Conversation, advanced: bool) -> list[tuple[Question, Situation]]:
    """The questions of a menu, each with its situation: those asked before the review, or the others that apply."""
    return [
        (question, situation)
        for question, situation in session.walk()
        if question.applies(situation) and question.asked(situation) is not advanced
    ]


def _menu(session: Conversation, title: str, advanced: bool) -> None:
    """Asks questions by name until the user is done."""
    chosen = None
    every = object()
    while True:
        options = []
        for question, situation in _listed(session, advanced):
            answer = answer_of(question, situation, session.given)
            options.append(Option(question.key, question.name, shown(question, situation, answer)))
        options += [Option(every, "all of these", "one after the other")] if advanced else []
        options.append(Option("", "done", "back to the review"))
        present = chosen if any(option.value == chosen for option in options) else options[0].value
        try:
            chosen = session.prompter.choose(Prompt(title, help="Enter asks it again."), options, present)
        except Back:
            return
        if not chosen:
            return
        for key in [option.value for option in options[:-2]] if chosen is every else [chosen]:
            if key in session.situation().answers:
                ask_one(session, key)


def _elsewhere(session: Conversation, target: Target) -> Target:
    """Another path that can be written; the same target where the person goes back."""
    prompt = Prompt("Save to which file?", help="A path; its folder must exist.")
    while True:
        try:
            typed = session.prompter.text(prompt, target.shown)
            path = Path(os.path.expanduser(typed))  # pathlib raises for an unknown ~user
            problem = why_not_writable(path)
            if problem:
                prompt = Prompt(prompt.title, problem=problem, help=prompt.help)
            elif not path.exists() or _overwrites(session, str(path), "exists"):
                return Target(path, target.former, target.dry_run, content_of(path))
        except Back:
            return target


def _overwrites(session: Conversation, shown: str, why: str) -> bool:
    kept = f"the old one is kept as {Path(shown).name}.bak"
    options = (Option(False, "no", "leave it as it is"), Option(True, "yes", kept))
    try:
        return bool(session.prompter.choose(Prompt(f"{shown} {why}. Replace it?"), options, False))
    except Back:
        return False


def content_of(path: Path) -> bytes | None:
    """The content of the file; None if there is none, or it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def why_not_writable(path: Path) -> str:
    """Why a file cannot be written there, or ""; checked before the first question."""
    if "\0" in str(path) or len(os.fsencode(path.name)) > _LONGEST_NAME_BYTES:
        return "no file can have this name; choose another."
    if problem := files.why_no_file(path):
        return problem
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path}: cannot be written; {files.ELSEWHERE}."
    return ""
