"""The engines by name: how each renders and checks a job, and the program that starts it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardkit.errors import UsageError
from shardkit.submit import jobset, kubeflow, kubernetes, ray_train, skypilot, slurm, ssh
from shardkit.submit.job import Job
from shardkit.wording import near_or


@dataclass(frozen=True)
class Engine:
    """`submit`: the command that starts a job; FILE stands for the job's file, and without FILE the job is passed on
    stdin. `flags`: the flags of `shardkit submit` that the engine supports. `options`: {key of --option: its help};
    None: any key, which the engine checks."""

    name: str
    render: Callable[[Job], str]
    problems: Callable[[Job], list[str]]
    submit: tuple[str, ...]
    flags: frozenset[str]
    options: Mapping[str, str] | None = field(default_factory=dict)
    test: tuple[str, ...] = ()
    """The engine's command to check a file without starting it; empty if it has none."""
    has_schema: bool = False
    needs_file: bool = False
    """Whether the job must be a file in the folder, since the engine's program uploads the folder."""


_KUBECTL = ("kubectl", "create", "-f", "-")
_LAUNCH = {"--no-prefix", "--measure", "--as-accelerate", "--accelerates-meaning"}
"""Of engines that run `shardkit launch`."""

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "slurm",
            slurm.render,
            slurm.problems,
            ("sbatch",),
            frozenset({"--time", "--memory", "--cpus", *_LAUNCH}),
            options=None,
            test=("sbatch", "--test-only"),
        ),
        Engine(
            "kubeflow",
            kubeflow.render,
            kubeflow.problems,
            _KUBECTL,
            frozenset({"--time", "--memory", "--cpus", "--image", "--volume", "--env", *_LAUNCH}),
            {**kubernetes.OPTIONS, **kubeflow.OPTIONS},
            has_schema=True,
        ),
        Engine(
            "jobset",
            jobset.render,
            kubernetes.problems,
            _KUBECTL,
            frozenset({"--time", "--memory", "--cpus", "--image", "--volume", "--env", *_LAUNCH}),
            kubernetes.OPTIONS,
            has_schema=True,
        ),
        Engine(
            "skypilot",
            skypilot.render,
            skypilot.problems,
            ("sky", "jobs", "launch", "--yes", "FILE"),
            frozenset({"--memory", "--cpus", "--image", "--volume", "--env", *_LAUNCH}),
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
        Engine(
            "ssh",
            ssh.render,
            ssh.problems,
            ("bash", "FILE"),
            frozenset({"--hosts", "--ssh", *_LAUNCH}),
            test=("bash", "-n"),
        ),
    )
}


def find(name: str) -> Engine:
    """The engine with this name, in any case. Raises UsageError if there is none."""
    if engine := ENGINES.get(name.strip().lower()):
        return engine
    if not name:
        first, *rest = ENGINES
        raise UsageError(f"--to: the engine is missing (got none); add --to {first}, or one of {', '.join(rest)}.")
    hint = near_or(name.lower(), ENGINES, f"use {', '.join(ENGINES)}.")
    raise UsageError(f"--to: unknown engine (got {name!r}); {hint}")


def problems(engine: Engine, name: str | None, flags: set[str], options: Mapping[str, str]) -> list[str]:
    """Problems of flags for this engine, whatever the configuration is. `name`: of the job, where it is given; `flags`:
    the given ones that not all engines support."""
    found = []
    if re.search(r"[^A-Za-z0-9_.-]", name or ""):
        found.append(f"--name: may only have letters, digits, dots and dashes (got {name!r}); give another name.")
    for flag in sorted(flags - engine.flags):
        able = ", ".join(one.name for one in ENGINES.values() if flag in one.flags)
        found.append(f"{flag}: is not supported by {engine.name} (only by {able}); remove it.")
    if engine.options is not None:
        found += [text for one in options.items() if (text := _problem_of_option(engine.name, engine.options, *one))]
    return found


def _problem_of_option(engine: str, known: Mapping[str, str], key: str, value: str) -> str | None:
    if key not in known:
        hint = near_or(key, known, f"it has {', '.join(known) or 'none'}.")
        return f"--option: {engine} has no option with this name (got {key!r}); {hint}"
    return None if value else f"--option {key}: has no value (got {key!r}); write {key}=VALUE."
