"""Checks a job without starting it, or passes it to the engine's program."""

import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from shardkit.errors import MachineError, RankFailure
from shardkit.launch import signals
from shardkit.submit.engines import Engine

CHECK_S = 60
"""How long the check of an engine may take."""
LOOK_S = 1.0
"""How often a wait for a program ends, so that a signal that came just before it is seen."""


def check(engine: Engine, text: str) -> tuple[list[str], str]:
    """(problems of a job, what checked it). Starts nothing. Raises MachineError if the checking program is missing."""
    if engine.has_schema:
        return schema_problems(text), "the schemas of the objects"
    if not engine.test:
        compile(text, engine.name, "exec")
        return [], "Python's compiler"
    if shutil.which(engine.test[0]) is None:
        raise MachineError(
            f"--check: {engine.test[0]} is not installed here; run this on a machine with {engine.name}."
        )
    try:
        done = subprocess.run(engine.test, input=text, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        raise MachineError(f"--check: {engine.test[0]} did not answer within {CHECK_S} s; try again.") from None
    output = " ".join(done.stderr.split())
    wrong = [f"{' '.join(engine.test)}: {output or f'exit code {done.returncode}'}"] if done.returncode else []
    return wrong, " ".join(engine.test)


def schema_problems(text: str) -> list[str]:
    """Problems of the objects in a YAML file, by their schemas. Raises MachineError if jsonschema is not installed."""
    if find_spec("jsonschema") is None:
        raise MachineError("--check: needs the package jsonschema; install it with: pip install 'shardkit[submit]'")
    import jsonschema

    found = []
    for value in yaml.safe_load_all(text):
        validator = jsonschema.Draft202012Validator(schema(value))
        for error in sorted(validator.iter_errors(value), key=lambda error: list(error.absolute_path)):
            where = ".".join(str(part) for part in error.absolute_path) or "the object"
            found.append(f"{value.get('kind', 'task')}: {where}: {error.message}.")
    return found


def schema(value: dict[str, Any]) -> dict[str, Any]:
    """The schema for an object, by its kind (a SkyPilot task has no kind), with the parts that schemas share."""
    folder = files("shardkit.submit") / "schemas"
    name = str(value.get("kind", "task")).lower()
    own = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    shared = yaml.safe_load((folder / "parts.yaml").read_text(encoding="utf-8"))
    return {**own, "$defs": shared}


def submit(engine: Engine, text: str, path: Path | None) -> None:
    """Pass a job to the engine's program, whose output is shown. `path`: the file with the text, if it was written.

    Raises MachineError if the program is not installed, RankFailure with its exit code if that is not 0.
    """
    program = engine.submit[0]
    if shutil.which(program) is None:
        raise MachineError(
            f"--submit: the program {program} is not installed here; run this on a machine with {engine.name}, or "
            "write the file with --output and copy it there."
        )
    if "FILE" not in engine.submit:
        code = _code_of(list(engine.submit), text)
    elif path is not None:
        code = _code_of(_words(engine, path))
    else:
        with tempfile.TemporaryDirectory(prefix="shardkit-") as folder:
            path = Path(folder) / "job.yaml"
            path.write_text(text, encoding="utf-8")
            code = _code_of(_words(engine, path))
    if code:
        raise RankFailure(
            f"submit: {program} failed (got exit code {code}); see its output above.", code if code > 0 else 128 - code
        )


def _code_of(words: list[str], text: str | None = None) -> int:
    """Run a program and return its exit code. Signals are forwarded, and its end is awaited, since ranks may be
    saving."""
    started: list[subprocess.Popen[str]] = []
    early: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        if number == signal.SIGINT:  # the terminal has sent it to the program, too
            return
        if started:
            started[0].send_signal(number)
        else:
            early.append(number)

    with signals.handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), pass_on):
        process = subprocess.Popen(words, stdin=None if text is None else subprocess.PIPE, text=True)
        started.append(process)
        for number in early:
            process.send_signal(number)
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(text, timeout=LOOK_S)
            text = None
    return process.returncode


def _words(engine: Engine, path: Path) -> list[str]:
    return [str(path) if word == "FILE" else word for word in engine.submit]
