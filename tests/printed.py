"""The commands in what shardkit prints, for tests: found in a text, and run in a shell as a reader would type them."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from shardkit.cli.main import VERBS

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(rf"(?:srun (?:--\S+ )+)?\bshardkit (?:{'|'.join(VERBS)})\b[^\n`]*")
# What stands in capitals is for the reader to replace.
READER = {"SCRIPT.py": "train.py", "MODULE:FUNCTION": "gpt:GPT", " N ": " 0 "}


def commands_in(text: str) -> list[str]:
    """Every command in a text, to the end of its line."""
    found = [match.strip() for match in COMMAND.findall(text)]
    for word, typed in READER.items():
        found = [command.replace(word, typed) for command in found]
    return found


def shell(command: str, folder: Path, bin_folder: Path, **variables: str) -> "subprocess.Popen[str]":
    """The command in a shell in which `shardkit` is this checkout's, and `srun` and `nvidia-smi` what lies in bin."""
    program = bin_folder / "shardkit"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardkit "$@"\n')
        program.chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **variables}
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def parse(words: list[str]) -> Any:
    """Read `shardkit WORDS...` as the program does, without doing anything; raises where a word is not understood."""
    verb, *rest = words
    if verb == "checkpoint" and not rest:  # tells its commands
        return None
    command: Any = typer.main.get_command(import_module(f"shardkit.cli.{verb}").app)
    context = command.make_context(verb, rest)
    kept = vars(context)  # by click 8.2 and newer, and by older ones
    left = [*kept.get("_protected_args", kept.get("protected_args", [])), *context.args]
    if hasattr(command, "resolve_command") and left:
        name, inner, inner_words = command.resolve_command(context, left)
        return inner.make_context(name, inner_words, parent=context)
    return context
