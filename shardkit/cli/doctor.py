"""`shardkit doctor`: tests what a run needs, on one machine or on all of them together, and advises what to change."""

from pathlib import Path
from typing import Annotated

import typer

from shardkit.cli import HELP, options

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


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
    from shardkit.doctor.examining import examine
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
