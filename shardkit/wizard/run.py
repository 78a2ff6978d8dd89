"""Interactive `shardkit config`: from the first question to the saved file."""

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit import env
from shardkit.config import files
from shardkit.config.command import command_for
from shardkit.config.hardware import Hardware, detect
from shardkit.config.schema import Config
from shardkit.errors import EXIT_INTERRUPTED, ConfigError, ModelError, UsageError
from shardkit.model import comment
from shardkit.model.adapters import Adapters
from shardkit.wizard import commands, draft
from shardkit.wizard.answers import from_config, to_config
from shardkit.wizard.loop import Conversation, ask_all, read_model
from shardkit.wizard.prompter import Back, Option, PlainPrompter, Prompt, Prompter
from shardkit.wizard.review import Target, content_of, review, why_not_writable
from shardkit.wizard.situation import Situation
from shardkit.wording import counted


@dataclass(frozen=True)
class WizardOptions:
    """The wizard's command-line options."""

    model: str | None = None
    """The model: module:function, a config.json, safetensors; None: asked for, or no model."""

    adapters: Adapters | None = None
    """What is trained of the model; None: all of it."""

    output: Path | None = None
    """The file to write; None: shardkit.yaml in `folder`."""

    force: bool = False
    """Start over even where the file exists (the old one is kept as .bak)."""

    dry_run: bool = False
    """Show the file and write nothing."""

    user: bool = False
    """Save as the user's file for all projects instead of in the folder."""

    plain: bool = False
    """Numbered lines and plain input: no redraw, no colour, ASCII."""

    no_input: bool = False
    """Never ask; raise an error with the flags to use instead."""

    folder: Path = field(default_factory=Path.cwd)
    """The project's folder."""


def run_wizard(options: WizardOptions) -> int:
    """Asks, reviews, saves; returns the exit code: 0 saved or quit, 130 stopped with Ctrl-C.

    Raises UsageError where questions are not possible: no terminal, CI, or no_input.
    """
    plain = options.plain or env.is_true("SHARDKIT_PLAIN") or env.get("TERM") in (None, "", "dumb")
    _check_that_somebody_answers(options, plain)
    return converse(options, _prompter(plain))


class _Left(Exception):
    """The user quit without changes."""


def converse(options: WizardOptions, prompter: Prompter, hardware: Hardware | None = None) -> int:
    """The whole session, with any prompter; for the detected hardware unless other hardware is given."""
    path = options.output or (files.user_path() if options.user else options.folder / "shardkit.yaml")
    if not options.user and (problem := why_not_writable(path)):
        raise ConfigError(problem)
    try:
        session, target = _begin(options, prompter, path, hardware or detect())
        if not session.start.has_base:
            ask_all(session)
        saved = review(session, target)
    except KeyboardInterrupt:
        more = "; the next run offers to resume" if draft.find(path) else ""
        print(f"shardkit config: stopped, nothing was written{more}.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Left:
        saved = None
    if saved is None:
        more = "; the next run offers to resume" if draft.find(path) else ""
        print(f"Nothing was written{more}.", file=sys.stderr)
        return 0
    draft.discard(path)
    _say_what_next(session, options, saved)
    return 0


def _check_that_somebody_answers(options: WizardOptions, plain: bool) -> None:
    reasons = {
        "--no-input was given": options.no_input,
        "$CI is set": bool(env.get("CI")),
        "stdin is not a terminal": sys.stdin is None or not sys.stdin.isatty(),
        "stdout is not a terminal": not plain and not sys.stdout.isatty(),
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    if reason:
        raise UsageError(
            f"config: cannot ask its questions ({reason}); give flags: --defaults, --set KEY=VALUE, --template NAME, "
            "--from FILE.\n  for example: shardkit config --defaults --set mixed_precision=bf16"
        )


def _prompter(plain: bool) -> Prompter:
    if plain:
        return PlainPrompter(shutil.get_terminal_size().columns)
    from shardkit.wizard.inplace import QuestionaryPrompter

    return QuestionaryPrompter()


def _begin(options: WizardOptions, prompter: Prompter, path: Path, hardware: Hardware) -> tuple[Conversation, Target]:
    """The session before the first question, and its file. All answers of a file to edit are given in it."""
    _greet(prompter, Situation(hardware, folder=options.folder), path, options)
    resumed = _resumed(prompter, path)
    former, config = _former(prompter, path, options)
    known = config or _from_accelerate(prompter, path, options)
    situation = Situation(
        hardware,
        adapters=options.adapters,
        base=known or Config(),
        has_base=known is not None,
        folder=options.folder,
    )
    own = from_config(known, situation) if known is not None else {}
    if spec := comment.read(former) if former else None:
        own["model"] = spec
    given = own | resumed | ({"model": options.model} if options.model else {})
    session = Conversation(prompter, situation, given)
    session.model_is_asked = options.model is None
    session.on_answer = lambda answers: draft.keep(path, _others(answers, own))
    _read_named_model(session)
    return session, Target(path, former, options.dry_run, content_of(path))


def _others(answers: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The answers other than the file's own, which is read again when the run is resumed."""
    return {key: value for key, value in answers.items() if key not in own or value != own[key]}


def _read_named_model(session: Conversation) -> None:
    """Reads the model given on the command line, in the file or by the stopped run; reports an error at once."""
    try:
        found = read_model(session)
        if found:
            session.prompter.say(f"  model: {found}")
    except ModelError as error:
        session.model_problem = str(error)
        if session.start.has_base:
            session.prompter.say(f"! {error}")


def _greet(prompter: Prompter, s: Situation, path: Path, options: WizardOptions) -> None:
    memory = f"{s.hardware.memory_bytes / 2**30:.0f} GiB of host memory"
    scheduler = f", {s.hardware.scheduler.name} job" if s.hardware.scheduler else ""
    prompter.say(f"Found here: {s.hardware.in_words}, {memory}{scheduler}.")
    verb = "Shows" if options.dry_run else "Writes"
    prompter.say(f"{verb} {Target(path).shown}. Ctrl-C stops; your answers are kept.")


def _resumed(prompter: Prompter, path: Path) -> dict[str, Any]:
    """The answers of a stopped run, if there are any and the user wants them."""
    found = draft.find(path)
    if found is None:
        return {}
    options = (Option(True, "resume", found.text(time.time())), Option(False, "start over", "discards these answers"))
    if _choose(prompter, Prompt("The last run was stopped before saving. Resume?"), options, True):
        return found.given
    draft.discard(path)
    return {}


def _former(prompter: Prompter, path: Path, options: WizardOptions) -> tuple[str | None, Config | None]:
    """Text and configuration of the file to edit; None and None for a new one."""
    if not path.is_file() or options.force:
        return None, None
    try:
        config = files.read(path).config
    except ConfigError as error:
        prompter.say(f"{error}")
        choices: tuple[Option, ...] = (Option("over", "start over", f"the old one is kept as {path.name}.bak"),)
        title = f"{path.name} exists, and cannot be read."
    else:
        choices = (Option("edit", "edit it", "opens the review with its answers; keeps its comments"),)
        choices += (Option("over", "start over", f"the old one is kept as {path.name}.bak"),)
        title = f"{path.name} exists ({_in_words(config)}). What now?"
    choices += (Option("stop", "keep it and quit", "--output PATH writes another file"),)
    chosen = _choose(prompter, Prompt(title), choices, choices[0].value)
    if chosen == "stop":
        raise _Left
    if chosen != "edit":
        return None, None
    return files.text_of_file(path), files.read(path).config  # again: the question may have waited for long


def _from_accelerate(prompter: Prompter, path: Path, options: WizardOptions) -> Config | None:
    """The configuration of an Accelerate file in the folder, if there is no shardkit file and the user accepts it."""
    here = [options.folder / name for name in files.ACCELERATE_NAMES if (options.folder / name).is_file()]
    found = here[0] if here else files.accelerates_own()
    if found is None or path.exists() or options.force:
        return None
    try:
        config = files.read(found).config
    except ConfigError:
        return None
    choices = (
        Option(True, "start from it", "opens the review with its answers; the file itself is not changed"),
        Option(False, "start over", "all questions are asked; the file itself is not changed"),
    )
    title = f"{found.name if here else found} is an Accelerate file ({_in_words(config)}). Start from it?"
    return config if _choose(prompter, Prompt(title), choices, True) else None


def _in_words(config: Config) -> str:
    strategy = config.fsdp.sharding_strategy.value if config.mode == "fsdp" else config.mode
    return f"{strategy}, {counted(config.num_processes, 'process', 'processes')}"


def _choose(prompter: Prompter, prompt: Prompt, options: tuple[Option, ...], default: Any) -> Any:
    """As the prompter's `choose`, without a previous question."""
    while True:
        try:
            return prompter.choose(prompt, options, default)
        except Back:
            continue


def _say_what_next(session: Conversation, options: WizardOptions, saved: Target) -> None:
    situation, model = session.situation(), session.given.get("model")
    if not saved.dry_run:
        print(f"Saved {saved.shown}.")
        lines = commands.lines(situation, saved.path, model)
        print("\n".join(lines))
        if meaning := commands.meanings(lines):
            session.prompter.say(meaning)
    of_user = files.is_users(saved.path)
    usual = of_user or saved.path == options.folder / "shardkit.yaml"
    again = command_for(to_config(situation), model, None if usual else saved.path, of_user)
    print(f"The same without questions:\n{again}", file=sys.stderr if saved.dry_run else sys.stdout)
