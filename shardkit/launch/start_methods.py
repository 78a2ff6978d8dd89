"""The two ways to start ranks: forked from one process that has imported torch, or each as a new Python process."""

import contextlib
import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardkit import env
from shardkit.errors import MachineError
from shardkit.launch import forking, names, preloaded, signals
from shardkit.launch.spec import LaunchSpec

POLL_S = 0.02


class RankProcess(Protocol):
    """A rank's process: a child of this process, and the leader of a session."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""


Start = Callable[[Sequence[Mapping[str, str]]], Sequence[RankProcess]]
"""Starts the ranks of this machine, given the variables of each rank in addition to those of this process."""


@contextlib.contextmanager
def prepared(spec: LaunchSpec) -> Iterator[Start]:
    """A context that yields a function to start ranks, any number of times. Imports torch, with the variables of the
    ranks."""
    env.update(spec.environment)
    before = preloaded.before()
    reason = "" if _is_exec(spec) else forking.why_not(spec.script, spec.is_module, spec.device)
    expected_threads = load_torch()
    if reason is None:
        reason = forking.why_not_now(preloaded.folder_of(spec.script, spec.is_module), expected_threads)
    if reason is not None:
        refuse_if_required(spec, reason)
        yield lambda own: start_each(spec.command, own)
        return
    template = forking.Template(modules_of(spec), before, expected_threads)
    try:
        yield lambda own: start_forked(spec, template, own)
    finally:
        template.close()


def _is_exec(spec: LaunchSpec) -> bool:
    """Whether to start new processes without trying to fork. That is the default on accelerators, since their libraries
    may have state that a fork breaks."""
    return spec.launch.start == "exec" or (spec.launch.start == "auto" and spec.device != "cpu")


def refuse_if_required(spec: LaunchSpec, reason: str) -> None:
    """Raises MachineError if the configuration requires forking."""
    if spec.launch.start == "fork":
        raise MachineError(f"launch: start: the ranks cannot be forked: {reason}; give --start auto or exec.")


def start_forked(
    spec: LaunchSpec, template: forking.Template, own: Sequence[Mapping[str, str]]
) -> Sequence[RankProcess]:
    """Fork every rank from the template; or start new processes if that turns out to be impossible."""
    reason = template.problem()
    if reason is not None:
        refuse_if_required(spec, reason)
        return start_each(spec.command, own)
    with all_or_none() as started, signals.held():
        started += [forking.Forked(pid) for pid in template.start(spec.rank_arguments, env.copy(), own)]
    return started


def start_each(command: Sequence[str], own: Sequence[Mapping[str, str]]) -> list[RankProcess]:
    """Start every rank as a new Python process. If one cannot be started, the others are killed."""
    shared = env.copy()
    with all_or_none() as started:
        for variables in own:
            with signals.held():
                started.append(
                    subprocess.Popen(command, env={**shared, **variables}, start_new_session=True, stderr=sys.stderr)
                )
    return started


@contextlib.contextmanager
def all_or_none() -> Iterator[list[RankProcess]]:
    """A list for the ranks that are started inside; an exception there, also that of a signal, kills them."""
    started: list[RankProcess] = []
    try:
        yield started
    except BaseException:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # not its group: a forked one may not lead one yet
        while any(process.poll() is None for process in started):
            time.sleep(POLL_S)
        raise


def load_torch() -> int:
    """Import torch.distributed. Returns the number of this process's threads that survive a fork."""
    was_collecting = gc.isenabled()
    gc.disable()  # importing torch creates a million permanent objects; collections would take a tenth of the time
    try:
        with contextlib.suppress(ImportError):
            import numpy  # noqa: F401
        threads = forking.count_threads()
        importlib.import_module("torch.distributed")
    finally:
        if was_collecting:
            gc.enable()
    return threads


def modules_of(spec: LaunchSpec) -> list[str]:
    """Modules that the script will import, found in its source."""
    script = Path(spec.script)
    text = script.read_text(errors="replace") if script.is_file() else ""
    uses_it = names.AROUND_SCRIPT in spec.environment or re.search(
        r"^\s*(?:import|from) shardkit\b", text, re.MULTILINE
    )
    return ["shardkit.runtime.accelerator"] if uses_it else []
