"""What `shardkit launch` does, from its flags to running ranks: check, describe, start."""

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import typer

from shardkit import env
from shardkit.config import files, hardware
from shardkit.config.files import LoadedConfig
from shardkit.config.scheduler import Scheduler
from shardkit.config.schema import Config
from shardkit.errors import ConfigError, ShardkitError
from shardkit.launch import attempts, declining, environment, generations, membership, names, pod, preflight, spec
from shardkit.launch.flags import Switches
from shardkit.launch.preflight import Machine, Problem
from shardkit.storage.url import place_of


@dataclass(frozen=True)
class Asked:
    """What a command line asks for. `command`: the script or module, and its arguments; `problems`: of the flags."""

    command: list[str]
    is_module: bool
    path: Path | None
    settings: dict[str, str]
    problems: list[str]
    switches: Switches
    dry_run: bool
    as_json: bool


def start(asked: Asked) -> None:
    """From flags to running ranks: check, describe, run."""
    loaded, machine = checked(asked)
    if preflight.is_on_pod(loaded.config):
        start_on_pod(asked, loaded)
        return
    command, switches = asked.command, asked.switches
    launched = spec.launch_spec(
        loaded.config,
        command[0],
        command[1:],
        is_module=asked.is_module,
        config_name=str(loaded.path) if loaded.path else "defaults for this machine",
        cores=machine.cores,
        variables=env.copy(),
        more_variables=_variables(switches),
        kind=machine.kind,
    )
    launched = replace(
        launched,
        has_prefix=launched.has_prefix and not switches.no_prefix,
        chosen=loaded.chosen,
        has_number=declining.has_number(loaded),
    )
    if asked.dry_run:
        is_elastic = launched.launch.min_machines is not None
        notes = [membership.summary(loaded.config)] if is_elastic else []
        print(json.dumps(spec.as_json(launched), indent=2) if asked.as_json else spec.as_text(launched, notes))
        return
    folder = attempts.run(launched) if launched.launch.min_machines is None else generations.run(launched)
    if switches.measure:
        from shardkit.plan.measured import beside_the_plan

        typer.echo(beside_the_plan(loaded.config, loaded.path, folder))


def start_on_pod(asked: Asked, loaded: LoadedConfig) -> None:
    """Launch on every machine of a TPU pod, with the flags given here; in a dry run print the commands."""
    shared = ["--config", str(loaded.path)] if loaded.path else []
    for name, value in asked.settings.items():
        if name not in ("machine_rank", "tpu_use_cluster"):
            shared += ["--set", f"{name}={value}"]
    shared += asked.switches.words
    lines = pod.commands(loaded.config, [*shared, *(["-m"] if asked.is_module else []), *asked.command], Path.cwd())
    if not asked.dry_run:
        pod.run(lines)
    elif asked.as_json:
        print(json.dumps({"commands": lines}, indent=2))
    else:
        print("\n".join([*(shlex.join(line) for line in lines), "Nothing was started (--dry-run)."]))


def checked(asked: Asked) -> tuple[LoadedConfig, Machine]:
    """(the configuration, the machine), after all checks. Raises all problems at once, and prints notes.

    The other machines of a run are told the problems, unless it is a dry run."""
    problems = [Problem(text) for text in asked.problems]
    if asked.command:
        problems += preflight.script_problems(asked.command[0], asked.is_module)
    else:
        problems.append(Problem("launch: no script is given; write: shardkit launch SCRIPT.py"))
    try:
        loaded = files.resolve(asked.path, asked.settings)
    except ConfigError as error:
        known = None if asked.dry_run else declining.with_address(asked.path, asked.settings)
        _refuse(asked, known, [*problems, *map(Problem, error.problems)])
        raise
    found = hardware.detect()
    machine = Machine.of(found)
    if asked.switches.force:
        machine = replace(machine, memory_bytes=None)
    problems += preflight.run_problems(loaded.config, machine, env.copy(), declining.has_number(loaded))
    if preflight.is_on_pod(loaded.config):
        problems += map(Problem, pod.problem_of_number(loaded.config, "machine_rank" in asked.settings))
    elif not (asked.dry_run or declining.has_number(loaded)):
        problems += preflight.number_problems(loaded.config, found.scheduler)
    problems += map(Problem, _problem_of_series(loaded.config))
    if asked.switches.measure and spec.device_of(loaded.config) == "xla":
        text = (
            "launch: --measure: torch_xla tells no memory where a process drives all devices (got XLA); leave it out."
        )
        problems.append(Problem(text))
    _refuse(asked, loaded, problems)
    for note in _notes(asked, loaded, machine, found.scheduler):
        typer.echo(note, err=True)
    return loaded, machine


def _problem_of_series(config: Config) -> list[str]:
    """Why a run cannot resume from the path that it is given, where several checkpoints lie; the ranks judge one."""
    resume = config.shardkit.checkpoint.resume
    if resume in ("never", "auto") or preflight.is_on_pod(config):
        return []
    from shardkit.checkpoint.loading import locate

    with suppress(ShardkitError, OSError):  # what cannot be read here
        refusal = locate.refusal_of_place(place_of(resume))
        return [f"launch: resume: {resume}: {refusal}; or give auto for the newest one."] if refusal else []
    return []


def _refuse(asked: Asked, loaded: LoadedConfig | None, problems: list[Problem]) -> None:
    """Raises one error with all problems, if there are any. The other machines that wait for this one, as far as
    `loaded` tells them, are told first, unless it is a dry run."""
    try:
        preflight.raise_all(problems)
    except ShardkitError as error:
        if loaded is not None and not asked.dry_run and _is_awaited(loaded):
            text = str(error).rpartition("\n")[0]  # without the line that counts the problems
            declining.tell_others(loaded.config, text)
        raise


def _is_awaited(loaded: LoadedConfig) -> bool:
    """Whether other machines wait for this one. Those of an elastic run wait for none in particular."""
    config = loaded.config
    is_fixed = config.num_machines > 1 and config.shardkit.launch.min_machines is None
    return is_fixed and declining.has_number(loaded) and not preflight.is_on_pod(config)


def _notes(asked: Asked, loaded: LoadedConfig, machine: Machine, scheduler: Scheduler | None) -> Iterator[str]:
    """What is told before the ranks start."""
    config, variables = loaded.config, env.copy()
    is_read = not asked.is_module and not asked.switches.as_accelerate and Path(asked.command[0]).is_file()
    source = Path(asked.command[0]).read_text(errors="replace") if is_read else ""
    notes = (
        *loaded.notes,
        None if loaded.path else _other_file(),
        preflight.driver_warning(machine) if loaded.origins["use_cpu"].kind == "hardware" else None,
        preflight.core_warning(config, machine),
        preflight.socket_warning(tempfile.gettempdir()),
        preflight.rank_warning(variables),
        preflight.job_warning(config, scheduler, variables),
        environment.cpu_note(config, spec.device_of(config), source),
        environment.context_note(config, spec.device_of(config), source),
        environment.spawn_note(source),
        *_notes_on_script(asked, config),
    )
    return filter(None, notes)


def _other_file() -> str | None:
    """A note on the user's Accelerate file, which is not used by default; None if there is none."""
    found = files.accelerates_own()
    return f"note: no shardkit.yaml was found; to use Accelerate's file, add --config {found}" if found else None


def _variables(switches: Switches) -> dict[str, str]:
    """The environment variables that make ranks measure, and those that make them replace accelerate."""
    measure = {names.MEASURE: "1"} if switches.measure else {}
    if not switches.as_accelerate:
        return measure
    from shardkit.compat import differences

    return {
        **measure,
        names.AROUND_SCRIPT: "shardkit.compat.startup",
        **({differences.VARIABLE: ",".join(switches.meaning)} if switches.meaning else {}),
    }


# ---- scripts that were written for Accelerate ----


def check_names(command: list[str], is_module: bool, switches: Switches) -> None:
    """Print the names of Accelerate in a script and the modules next to it, and what differs in a run with these
    switches. Exits with 1 if some names are not supported."""
    from shardkit.compat import scan

    script = preflight.script_problems(command[0], is_module) if command else []
    if not command:
        script = [Problem("launch: no script is given; write: shardkit launch --as-accelerate --check SCRIPT.py")]
    preflight.raise_all(script)
    found = scan.scan_script(command[0], is_module)
    typer.echo(scan.report(found, switches.meaning))
    if found.refused or found.missing or found.unread:
        raise typer.Exit(1)


def problems_of_compat(command: str, switches: Switches, check: bool = False) -> list[str]:
    """Problems of this command with the flags that require --as-accelerate."""
    flags = [flag for flag, given in (("--check", check), ("--accelerates-meaning", bool(switches.meaning))) if given]
    if not flags:
        return []
    from shardkit.compat import differences

    problems = []
    if not switches.as_accelerate:
        problems.append(
            f"{command}: --as-accelerate is missing (got {', '.join(flags)}); add it, or remove {' and '.join(flags)}."
        )
    unknown = [word for word in switches.meaning if word not in differences.choices()]
    if unknown:
        known = ", ".join(differences.choices())
        problems.append(f"{command}: --accelerates-meaning: unknown value (got {', '.join(unknown)}); use {known}.")
    return problems


def _notes_on_script(asked: Asked, config: Config) -> list[str]:
    """Notes on lines that are right only with a behavior of Accelerate's that this run does not use, or without FSDP.
    One rank steps its scheduler as Accelerate's does."""
    if not asked.switches.as_accelerate:
        return []
    from shardkit.compat import scan

    remarks = scan.scan_script(asked.command[0], asked.is_module).remarks
    has_several = config.num_processes > 1
    matters = {
        scan.STRETCHED: has_several,
        scan.OF_ALL_RANKS: has_several,
        scan.SKIPS_AGAIN: True,
        scan.OF_ONE_RANK: has_several and config.mode == "fsdp",
    }
    holding = [one for one in scan.holding(remarks, asked.switches.meaning) if matters.get(one.text)]
    return [f"note: {one.place}: {one.name}: {one.text}." for one in holding]
