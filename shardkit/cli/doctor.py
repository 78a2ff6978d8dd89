"""`shardkit doctor`: tests what a run needs, on one machine or on all of them together, and advises what to change."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardkit.cli import HELP, options

if TYPE_CHECKING:
    from shardkit.config.schema import Config
    from shardkit.doctor.findings import Finding
    from shardkit.launch.preflight import Machine

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)

PATIENCE_S = {"meet_timeout_s": 120.0, "hang_timeout_s": 60.0, "process_group_timeout_s": 120.0}
"""Upper limits of timeouts, which are longer in a run."""
ONCE = {"shardkit.launch.max_restarts": "0", "shardkit.launch.min_machines": "null"}
"""All machines are tried together, once."""


@app.command()
def doctor(
    config: options.ConfigFile = None,
    processes: options.Processes = None,
    machines: options.Machines = None,
    machine_rank: options.MachineRank = None,
    main: options.Main = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Test the CPU and gloo.")] = False,
    settings: options.Settings = None,
    folder: Annotated[
        Path, typer.Option("--folder", help="Folder of checkpoints and logs, whose disk is tested.", **options.PATH)
    ] = Path("."),
    as_json: options.AsJson = False,
) -> int:
    """Test what a run with this configuration needs, and advise what to change. With several machines: run it on each,
    as `shardkit launch`. The exit code is not 0 if a run would fail."""
    from shardkit.config import files
    from shardkit.launch import declining, flags

    given = {
        "num_processes": options.by("--num-processes", processes),
        "num_machines": options.by("--num-machines", machines),
        "machine_rank": options.by("--machine-rank", machine_rank),
        "use_cpu": options.by("--cpu", "true" if cpu else None),
    }
    chosen, problems = flags.read_all(given, (flags.main_settings, main), settings=settings)
    loaded = problems.of(files.resolve, config, chosen)
    if problems.lines and (known := declining.with_address(config, chosen)):
        declining.tell_others(known.config, "\n".join(problems.lines))
    problems.raise_all()
    assert loaded is not None
    return examine(loaded.config, str(loaded.path or "defaults for this machine"), folder.resolve(), as_json)


def examine(config: "Config", config_name: str, folder: Path, as_json: bool) -> int:
    """Test this machine, then all ranks together. Prints the findings and returns the exit code."""
    from shardkit import env
    from shardkit.config import hardware
    from shardkit.doctor import findings, machine
    from shardkit.doctor.findings import Level
    from shardkit.errors import EXIT_MACHINE
    from shardkit.launch import declining
    from shardkit.launch.preflight import Machine

    here = Machine.of(hardware.detect())
    say("testing this machine")
    with nullcontext() if config.num_machines > 1 else left_as_it_was(folder):
        own = [
            replace(finding, machine=config.machine_rank)
            for finding in machine.findings(config, here, folder, env.copy())
        ]
        if findings.has_error(own):
            say("a run would not start here, so the ranks are not tested")
            reasons = [f"{one.check}: {one.found}" for one in own if one.level is Level.ERROR]
            declining.tell_others(config, "\n".join(reasons))
            result: dict[str, Any] = {"machines": {}, "findings": findings.as_json(own), "measured": []}
        else:
            result = together(config, config_name, folder, here, own)
    rows = findings.from_json(result["findings"])
    if as_json:
        print(json.dumps({"ok": not findings.has_error(rows), **result}, indent=2))
    else:
        print(findings.render(rows, config.num_machines))
    return EXIT_MACHINE if findings.has_error(rows) else 0


@contextmanager
def left_as_it_was(folder: Path) -> Iterator[None]:
    """Removes the folder and its parents afterwards, as far as they were not there before and are empty. For one
    machine: another one may still use them."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    finally:
        with suppress(OSError):
            for place in new:
                place.rmdir()


def together(config: "Config", config_name: str, folder: Path, here: "Machine", own: list["Finding"]) -> dict[str, Any]:
    """The findings of the ranks on all machines, and of each machine alone."""
    from shardkit import env
    from shardkit.config import files
    from shardkit.doctor import findings, ranks_files
    from shardkit.doctor.findings import Finding, Level
    from shardkit.errors import ShardkitError
    from shardkit.launch import attempts, spec

    limits = config.shardkit.launch
    soon = {f"shardkit.launch.{name}": f"{min(getattr(limits, name), most):g}" for name, most in PATIENCE_S.items()}
    try:
        with folder_of_logs() as logs:
            launched = spec.launch_spec(
                files.overlaid(config, {**soon, **ONCE, "shardkit.launch.log_dir": str(logs)}),
                str(Path(ranks_files.__file__).with_name("ranks.py")),
                config_name=config_name,
                cores=here.cores,
                has_prefix=False,
                variables=env.copy(),
                more_variables={ranks_files.FOLDER: str(folder)},
                kind=here.kind,
            )
            (logs / ranks_files.OWN).write_text(json.dumps(findings.as_json(own)))
            attempts.run(launched)
            result: dict[str, Any] = json.loads((logs / ranks_files.RESULT).read_text())
    except ShardkitError as error:
        failed = Finding("ranks", str(error).removeprefix("launch: ").replace("\nlaunch: ", "\n"), Level.ERROR)
        return {"machines": {}, "findings": findings.as_json([*own, failed]), "measured": []}
    return result


@contextmanager
def folder_of_logs() -> Iterator[Path]:
    """A temporary folder. It stays where an error names it, for the logs of the ranks that failed."""
    from shardkit.errors import ShardkitError
    from shardkit.launch import folders

    logs = Path(tempfile.mkdtemp(prefix=f"{folders.PREFIX}doctor-"))  # a TemporaryDirectory forked ranks would remove
    is_named = False
    try:
        with folders.locked(logs):  # where this process is killed, the next launch removes it
            yield logs
    except ShardkitError as error:
        is_named = folders.short(logs) in str(error)
        raise
    finally:
        if is_named:
            (logs / folders.IN_USE).unlink(missing_ok=True)
        else:
            shutil.rmtree(logs, ignore_errors=True)


def say(text: str) -> None:
    """Report progress on stderr."""
    print(f"doctor: {text}", file=sys.stderr, flush=True)
