"""`shardkit config`: create a shardkit.yaml from answers or flags; validate, show and convert configuration files."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardkit.cli import HELP, config_text, options
from shardkit.errors import ConfigError, UsageError
from shardkit.problems import Problems

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)

Force = Annotated[bool, typer.Option("--force", help="Replace an existing file; the old one is kept as .bak.")]


@app.callback(invoke_without_command=True)
def config(
    context: typer.Context,
    defaults: Annotated[bool, typer.Option("--defaults", help="Ask nothing; use defaults for this machine.")] = False,
    settings: options.Settings = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Start from a file of shardkit, Accelerate or NeMo.", **options.PATH)
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            metavar="NAME",
            help="Start from a template: cpu, ddp, fsdp, fsdp-hybrid, multi-node, slurm, tpu, or the path of one.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; default: ./shardkit.yaml.", **options.PATH)
    ] = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file, write nothing.")] = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask; an error if an answer is needed.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Numbered lines instead of menus; for screen readers.")
    ] = False,
    user: Annotated[bool, typer.Option("--user", help="Save as the user's file for all projects.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="module:function, config.json, .safetensors, or llama-3.1-8b."),
    ] = None,
    lora: options.Lora = None,
    lora_targets: options.LoraTargets = None,
    load_in_4bit: options.LoadIn4Bit = False,
) -> int:
    """Create a shardkit.yaml by answering a few questions; from flags with --defaults, --set, --template or --from."""
    if context.invoked_subcommand is not None:
        return 0
    from shardkit.cli import configuring
    from shardkit.config.command import settings_from

    problems = Problems()
    if source and template is not None:
        problems.add("config: --from and --template exclude each other (got both); give one of them.")
    if user and output:
        problems.add("config: --user and --output exclude each other (got both); give one of them.")
    if defaults or settings or source or template is not None:
        target = configuring.target_of(output, user)
        problems.add(configuring.problem_of_model(model))
        if lora or lora_targets or load_in_4bit:
            problems.add(
                "config: --lora, --lora-targets and --load-in-4bit are for the estimates beside the questions (got no "
                "questions); leave them out here, and give them to shardkit plan."
            )
        given = problems.of(settings_from, settings or [])
        started = problems.of(configuring.start_from, source, template, given or {})
        if not dry_run and not user:
            problems.add(configuring.target_problem(target, force))
        problems.raise_all()
        assert started is not None
        start, note = started
        configuring.save(start, target, source, model, force, dry_run)
        print(note, end="", file=sys.stderr)
        return 0
    from shardkit.model.adapters import adapters_of

    adapters = problems.of(adapters_of, lora, lora_targets, load_in_4bit)
    problems.raise_all()
    from shardkit.wizard.run import WizardOptions, run_wizard

    return run_wizard(WizardOptions(model, adapters, output, force, dry_run, user, plain, no_input))


@app.command()
def validate(
    file: Annotated[
        Path | None, typer.Argument(help="The file; default: the one that launch would use.", **options.PATH)
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The same as PATH.", **options.PATH)] = None,
    as_json: options.AsJson = False,
) -> int:
    """Validate a file. Prints all problems, with line and column."""
    from shardkit.cli.configuring import hint_at_accelerate
    from shardkit.config.files import find, read

    if file is not None and config is not None:
        raise UsageError(f"config validate: two files (got {file} and --config {config}); give one.")
    path = file or config or find(Path.cwd())
    if path is None:
        raise UsageError(
            f"config validate: no shardkit.yaml in this folder or its parents; give the file{hint_at_accelerate()}."
        )
    try:
        loaded = read(path)
    except ConfigError as error:
        if as_json:
            print(json.dumps({"valid": False, "file": str(path), "problems": error.problems, "notes": []}, indent=2))
            return error.exit_code
        raise
    if as_json:
        print(json.dumps({"valid": True, "file": str(path), "problems": [], "notes": loaded.notes}, indent=2))
        return 0
    print(f"{path}: valid. {config_text.summary(loaded)}.")
    for note in loaded.notes:
        print(f"note: {note}")
    return 0


@app.command()
def show(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY",
            help="One setting or block, like fsdp_config; default: all, without defaults below shardkit.",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--config", help="The file; default: the one that launch would use.", **options.PATH)
    ] = None,
    settings: options.Settings = None,
    origin: Annotated[bool, typer.Option("--origin", help="Show where each value comes from.")] = False,
    as_json: options.AsJson = False,
    diff: Annotated[
        Path | None, typer.Option("--diff", help="Show only differences from another file.", **options.PATH)
    ] = None,
) -> int:
    """Show the settings of a launch in this folder. Flags come first, then environment, file and defaults."""
    from pydantic_core import to_jsonable_python

    from shardkit.cli import configuring
    from shardkit.config.command import settings_from
    from shardkit.config.files import dump, read, resolve

    problems = Problems()
    given = problems.of(settings_from, settings or [])
    loaded = problems.of(resolve, file, given or {})
    names = problems.of(configuring.names_below, key)
    other = None if diff is None else problems.of(read, diff)
    problems.raise_all()
    assert loaded is not None and names is not None
    name = loaded.path or f"no file; defaults for this machine{configuring.hint_at_accelerate()}"
    print(f"configuration: {name}", file=sys.stderr)
    if other is not None:
        names = config_text.differing(loaded.config, other.config, names)
    if as_json:
        print(json.dumps(to_jsonable_python(config_text.data(loaded, names, origin, other)), indent=2))
        return 0
    if other is not None:
        lines = config_text.difference(loaded, other, names, origin)
    elif origin:
        lines = config_text.origins(loaded, names, everything=key is not None)
    else:
        lines = config_text.values(loaded.config, names) if key else dump(loaded.config, comments=False).splitlines()
    for line in lines:
        print(line)
    return 0


@app.command()
def convert(
    file: Annotated[
        Path, typer.Argument(help="A file of Accelerate or NeMo; with --to, a shardkit.yaml.", **options.PATH)
    ],
    to: Annotated[
        str | None, typer.Option("--to", metavar="TOOL", help="accelerate: write a file for Accelerate.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; default: print.", **options.PATH)
    ] = None,
    force: Force = False,
    drop: Annotated[bool, typer.Option("--drop", help="Drop unsupported settings instead of stopping.")] = False,
) -> int:
    """Convert a file from or to another tool. Reports what happened to every key."""
    if to is not None and to.lower() != "accelerate":
        raise UsageError(f"config convert: --to: unknown format (got {to}); use accelerate.")
    from shardkit.cli import configuring

    text = configuring.from_tool(file, drop) if to is None else configuring.for_accelerate(file)
    if output is None:
        print(text, end="")
    else:
        configuring.write_target(text, output, force)
        print(output)
    return 0


@app.command()
def schema() -> int:
    """Print the JSON Schema of shardkit.yaml. Editors complete and validate the file with it."""
    from shardkit.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
