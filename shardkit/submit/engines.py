"""The engines by name: how each renders a job, what it refuses, and the program that takes its file."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from shardkit.errors import UsageError
from shardkit.submit import jobset, kubeflow, kubernetes, ray_train, skypilot, slurm, ssh
from shardkit.submit.job import Job


@dataclass(frozen=True)
class Engine:
    """`submit`: the program that starts a job and its words; FILE stands for the file, and without it the text is its
    input. `schemas`: of the objects in the file. `flags`: those of `shardkit submit` that mean something here.
    `options`: the keys of --option, with what they say; None: any, because the engine has its own list."""

    name: str
    render: Callable[[Job], str]
    problems: Callable[[Job], list[str]]
    submit: tuple[str, ...]
    flags: frozenset[str]
    options: Mapping[str, str] | None = field(default_factory=dict)
    test: tuple[str, ...] = ()
    """The engine's own check of a file, which starts nothing; where its program is there."""
    has_schema: bool = False
    needs_file: bool = False
    """The file must be one that stays: what the program takes along is the folder."""


_KUBECTL = ("kubectl", "create", "-f", "-")

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "slurm",
            slurm.render,
            slurm.problems,
            ("sbatch",),
            frozenset({"--time", "--memory", "--cpus"}),
            options=None,
            test=("sbatch", "--test-only"),
        ),
        Engine(
            "kubeflow",
            kubeflow.render,
            kubeflow.problems,
            _KUBECTL,
            frozenset({"--time", "--memory", "--cpus", "--image", "--volume"}),
            {**kubernetes.OPTIONS, **kubeflow.OPTIONS},
            has_schema=True,
        ),
        Engine(
            "jobset",
            jobset.render,
            jobset.problems,
            _KUBECTL,
            frozenset({"--time", "--memory", "--cpus", "--image", "--volume"}),
            kubernetes.OPTIONS,
            has_schema=True,
        ),
        Engine(
            "skypilot",
            skypilot.render,
            skypilot.problems,
            ("sky", "jobs", "launch", "--yes", "FILE"),
            frozenset({"--memory", "--cpus", "--image", "--volume"}),
            skypilot.OPTIONS,
            has_schema=True,
        ),
        Engine(
            "ray",
            ray_train.render,
            ray_train.problems,
            ("ray", "job", "submit", "--working-dir", ".", "--", "python", "FILE"),
            frozenset({"--cpus"}),
            ray_train.OPTIONS,
            needs_file=True,
        ),
        Engine("ssh", ssh.render, ssh.problems, ("bash", "FILE"), frozenset({"--hosts", "--ssh"}), test=("bash", "-n")),
    )
}


def find(name: str) -> Engine:
    """The engine of that name. UsageError where there is none."""
    if name in ENGINES:
        return ENGINES[name]
    if not name:
        first, *rest = ENGINES
        raise UsageError(f"--to: which engine? (got none); add --to {first}, or one of {', '.join(rest)}.")
    near = get_close_matches(name, ENGINES, 1)
    hint = f"did you mean {near[0]}?" if near else f"use {', '.join(ENGINES)}."
    raise UsageError(f"--to: no such engine (got {name!r}); {hint}")


def problems(engine: Engine, job: Job, flags: set[str]) -> list[str]:
    """What is wrong with a job for this engine. `flags`: those that were given, of those that not every engine has."""
    found = []
    if re.search(r"[^A-Za-z0-9_.-]", job.name):
        found.append(f"--name: is made of letters, digits, dots and dashes (got {job.name!r}); give another --name.")
    for flag in sorted(flags - engine.flags):
        able = ", ".join(one.name for one in ENGINES.values() if flag in one.flags)
        found.append(f"{flag}: means nothing to {engine.name} (it is for {able}); leave it out.")
    for key in job.options if engine.options is not None else ():
        if key not in (engine.options or {}):
            near = get_close_matches(key, engine.options or (), 1)
            known = f"did you mean {near[0]}?" if near else f"it knows {', '.join(engine.options or {}) or 'none'}."
            found.append(f"--option: {engine.name} has none of this name (got {key!r}); {known}")
    return [*found, *engine.problems(job)]
