"""`shardkit launch train.py`: starts a script on several ranks. What it does is in `launching.py`."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shardkit.cli import HELP, options
from shardkit.errors import RankFailure


class LaunchCommand(TyperCommand):
    """A command whose arguments after the script, or after `-m module`, are passed to the script. Also accepts
    Accelerate's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from shardkit.launch.other_launchers import in_our_words

        return super().parse_args(ctx, in_our_words(args, self._options_with_a_value()))

    def _options_with_a_value(self) -> set[str]:
        return {name for option in self.params if not getattr(option, "is_flag", False) for name in option.opts}


app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False, **HELP})
def launch(
    script: options.Script = None,
    module: options.Module = None,
    config: options.ConfigFile = None,
    processes: options.Processes = None,
    machines: options.MachinesOrRange = None,
    machine_rank: options.MachineRank = None,
    main: options.Main = None,
    cpu: options.Cpu = False,
    mixed_precision: options.MixedPrecision = None,
    fsdp: options.Fsdp = None,
    fsdp_config: options.FsdpConfig = None,
    settings: options.Settings = None,
    resume: options.Resume = None,
    restarts: options.Restarts = None,
    logs: Annotated[
        str | None, typer.Option("--logs", metavar="DIR", help="Folder for every rank's output; default: runs/DATE.")
    ] = None,
    show: options.Show = None,
    start_by: Annotated[
        str | None, typer.Option("--start", metavar="HOW", help="How ranks start: fork, exec, or auto (default).")
    ] = None,
    no_prefix: options.NoPrefix = False,
    measure: options.Measure = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start even if the host memory seems too small for the ranks.")
    ] = False,
    as_accelerate: options.AsAccelerate = False,
    accelerates_meaning: options.AcceleratesMeaning = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="With --as-accelerate: list the script's names of Accelerate; start nothing."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
) -> None:
    """Start SCRIPT on several ranks. Arguments after the script are passed to it; options before it override the
    file."""
    from shardkit.cli import launching
    from shardkit.launch import flags

    given = {
        **options.plain_settings(processes, cpu, mixed_precision, resume, restarts, show),
        "machine_rank": options.by("--machine-rank", machine_rank),
        "shardkit.launch.log_dir": options.by("--logs", logs),
        "shardkit.launch.start": options.by("--start", start_by),
    }
    chosen, problems = flags.read_all(
        given,
        (flags.machines_settings, machines),
        (flags.main_settings, main),
        (flags.fsdp_settings, fsdp),
        (flags.fsdp_file_settings, fsdp_config),
        settings=settings,
    )
    command = [module, *(script or [])] if module else list(script or [])
    switches = flags.Switches(no_prefix, measure, force, as_accelerate, flags.words_in(accelerates_meaning))
    problems.lines += launching.problems_of_compat("launch", switches, check)
    if as_json and not dry_run:
        problems.add("launch: --dry-run is missing (got --json); add it, or remove --json.")
    if check and not problems.lines:
        launching.check_names(command, bool(module), switches)
        return
    asked = launching.Asked(command, bool(module), config, chosen, problems.lines, switches, dry_run, as_json)
    try:
        launching.start(asked)
    except RankFailure as error:
        if text := _options_after(command, error):
            raise RankFailure(f"{error}\n{text}", error.exit_code) from error
        raise


def _options_after(command: list[str], error: RankFailure) -> str:
    """A line on options of launch among the arguments of a script that has refused its arguments; else nothing."""
    if "SystemExit: the script called sys.exit(2)" not in str(error).partition("\n")[0]:  # as argparse and click do
        return ""
    known = {name for option in typer.main.get_command(app).params for name in option.opts}
    found = [word for word in command[1:] if word.partition("=")[0] in known]
    return f"  options  the script got {' '.join(found)}; options of launch go before the script" if found else ""
