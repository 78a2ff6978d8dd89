"""`shardkit VERB ...`: runs the verb's file. Only that file is imported, so every verb starts fast."""

import os
import re
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any

from shardkit import __version__, env, systems
from shardkit.cli import habits
from shardkit.cli.advice import ADVICE, FULL
from shardkit.errors import EXIT_BUG, EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_MACHINE, ShardkitError
from shardkit.fast_exit import exit_without_torch_teardown
from shardkit.launch import signals

# If the reader of the output closes the pipe: the exit code of shells for a program that SIGPIPE (13) ended.
EXIT_UNREAD = 128 + 13

TOO_MANY = ("can't start new thread", "Resource temporarily unavailable", "Failed to init uv loop")
"""Errors of Python, the kernel and torch's store where the user has too many processes, threads or open files."""

VERBS = {
    "config": "create a shardkit.yaml by answering a few questions",
    "plan": "estimate memory and traffic per rank, for any number of GPUs, without having them",
    "launch": "start a training script on several ranks",
    "submit": "make a job for SLURM, Kubeflow, JobSet, SkyPilot, Ray or ssh",
    "migrate": "show the changes to a script that was written for Accelerate",
    "checkpoint": "list, inspect, verify, diff, merge, prune and convert saved states",
    "env": "show this machine's devices, backends and versions",
    "doctor": "test what a run needs, on one machine or all of them, and advise what to change",
    "completion": "print the shell completion for bash, zsh or fish",
}


def main(arguments: list[str] | None = None) -> None:
    """The program. Exits with 0, or the error's exit code (see shardkit/errors.py)."""
    _open_closed_streams()
    signals.undo_of_parent()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # a second Ctrl-C, while the first one was being reported
        code = EXIT_INTERRUPTED
    signals.end_at_once_with(code)
    if "torch" in sys.modules:
        exit_without_torch_teardown(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Errors are printed to stderr, with a traceback if $SHARDKIT_DEBUG
    is set."""
    verb = arguments[0] if arguments else "help"
    code = EXIT_UNREAD
    try:
        code = _answer(verb, arguments[1:])
        sys.stdout.flush()  # here, where an error can still be reported
        return code
    except KeyboardInterrupt:
        _say(f"shardkit {verb}: stopped.")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe
        _stop_printing()
        return code
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            _stop_printing()
        if told := _problem_of_machine(error):
            _say(f"shardkit {verb}: {told}", has_traceback=env.is_true("SHARDKIT_DEBUG"))
            return EXIT_MACHINE
        _say("shardkit: this is a bug in shardkit; please report it with the lines above.", has_traceback=True)
        return EXIT_BUG


def _say(text: str, has_traceback: bool = False) -> None:
    """Prints how a command ended, after the traceback of the present error. Where nobody reads it any more (a closed
    terminal, `2>&1 | head -1`), the exit code says it alone."""
    with suppress(OSError):
        if has_traceback:
            traceback.print_exc()
        print(text, file=sys.stderr, flush=True)


def _problem_of_machine(error: Exception) -> str | None:
    """What is wrong with the surroundings of any command, and what to do; None if the error is another one."""
    if isinstance(error, OSError) and error.errno in ADVICE:
        where = error.filename or ("the output" if error.errno in FULL else "the system")
        return f"{where}: {error.strerror}; {ADVICE[error.errno]}."
    if isinstance(error, (BlockingIOError, RuntimeError)) and any(text in str(error) for text in TOO_MANY):
        return f"{error}; end other processes of this user, or raise the limits: ulimit -u, ulimit -n."
    if isinstance(error, UnicodeEncodeError):
        found = f"{error.object[error.start : error.end]!r} is not in {error.encoding}"
        return f"the locale has no such character ({found}); set PYTHONUTF8=1, or LC_ALL=C.UTF-8."
    if not isinstance(error, FileNotFoundError):
        return None
    if "temporary directory" in str(error):  # of tempfile.gettempdir
        return f"{error.strerror}; set TMPDIR to a folder that can be written."
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working folder was deleted; change to another one."
    return None


def _answer(verb: str, arguments: list[str]) -> int:
    if verb == "help" and arguments and arguments[0] in VERBS:
        return _answer(arguments[0], ["--help"])
    if verb in {"-h", "--help", "help"}:
        print(_overview())
        return 0
    if verb in {"-V", "--version"}:
        print(f"shardkit {__version__}")
        return 0
    if verb not in VERBS:
        print(_unknown(verb), file=sys.stderr)
        return EXIT_CONFIG
    os.getcwd()  # where it was deleted, an error here: native libraries of torch would end the process
    try:
        systems.check()
        return _call(verb, arguments)
    except ShardkitError as error:
        _say(str(error), has_traceback=env.is_true("SHARDKIT_DEBUG"))
        return error.exit_code


def _open_closed_streams() -> None:
    """Open /dev/null as stdin, stdout and stderr where these were closed at the start (`>&-`, some daemons): else files
    opened later get their descriptors, and receive what ranks print."""
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so usually `descriptor`
            os.set_inheritable(nowhere, nowhere == descriptor)
            setattr(sys, name, open(nowhere, mode, closefd=False))  # noqa: SIM115


def _stop_printing() -> None:
    """Redirect stdout to /dev/null: otherwise Python flushes its buffer again at exit, and prints an error."""
    with suppress(OSError):  # a stdout without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _call(verb: str, arguments: list[str]) -> int:
    import typer

    # typer brings its own copy of click, under a private name; this is that copy's ClickException.
    problem_with_the_flags: Any = typer.BadParameter.__mro__[2]
    command = typer.main.get_command(import_module(f"shardkit.cli.{verb}").app)
    _name_arguments_alone(command)
    try:
        # As command.main(), which would exit with 1, the code of a failed check, on a closed pipe.
        with command.make_context(f"shardkit {verb}", arguments) as context:
            result = command.invoke(context)
    except typer.Exit as stop:
        return stop.exit_code
    except problem_with_the_flags as error:
        _say_what_is_meant(verb, error)
        error.show()
        return EXIT_CONFIG
    except typer.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


def _name_arguments_alone(command: Any) -> None:
    """Keeps Python's types out of the help, as in `SCRIPT <list[Path]>`: typer shows them from 0.29 on."""
    for one in (command, *getattr(command, "commands", {}).values()):
        for argument in one.params:
            if argument.param_type_name == "argument":
                argument.display_type_rich = lambda ctx: None


def _say_what_is_meant(verb: str, error: Any) -> None:
    """Adds what may be meant to click's error of an unknown option or command, in our words: versions of click and
    typer have their own."""
    command = re.match(r"No such command '([^']*)'", error.message)
    typed: str = command[1] if command else getattr(error, "option_name", None) or ""
    if not command and not (typed and hasattr(error, "possibilities")):
        return
    if near := habits.command_meant(verb, typed):
        error.message = f"No such {'command' if command else 'option'}: {typed} (Possible command: {near})"
    elif not command:
        takes_settings = any("--set" in option.opts for option in error.ctx.command.params)
        options = ", ".join(sorted(habits.meant(verb, typed, takes_settings) or error.possibilities or ()))
        error.message = f"No such option: {typed}" + (f" (Possible options: {options})" if options else "")
    error.possibilities = None


def _overview() -> str:
    lines = [f"  shardkit {verb:<11} {text}" for verb, text in VERBS.items()]
    return "\n".join(
        [
            "Train a PyTorch model on more than one device.",
            "",
            *lines,
            "",
            "shardkit VERB -h shows help on a verb; shardkit --version prints the version.",
        ]
    )


def _unknown(verb: str) -> str:
    from difflib import get_close_matches

    near = habits.command_meant("", verb) or next(iter(get_close_matches(verb, VERBS, 1)), None)
    hint = f"did you mean {near}?" if near else f"use one of {', '.join(VERBS)}."
    return f"shardkit: unknown verb (got {verb!r}); {hint}"
