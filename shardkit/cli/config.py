"""`shardkit config`: create a shardkit.yaml from answers or flags; validate, show and convert configuration files."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardkit.cli import HELP, config_text, options
from shardkit.errors import ConfigError, UsageError
from shardkit.problems import Problems

if TYPE_CHECKING:
    from shardkit.config.files import LoadedConfig
    from shardkit.config.schema import Config
    from shardkit.convert.report import Conversion

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
        str | None, typer.Option("--template", metavar="NAME", help="Start from a template, by name or path.")
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
) -> int:
    """Create a shardkit.yaml by answering a few questions; with --defaults, --set, --template or --from from flags."""
    if context.invoked_subcommand is not None:
        return 0
    problems = Problems()
    if source and template is not None:
        problems.add("config: --from and --template exclude each other (got both); give one of them.")
    if user and output:
        problems.add("config: --user and --output exclude each other (got both); give one of them.")
    if defaults or settings or source or template is not None:
        target = _target(output, user)
        problems.add(_problem_of_model(model))
        given = problems.of(_settings, settings)
        started = problems.of(_start, source, template, given or {})
        if not dry_run and not user:
            problems.add(target_problem(target, force))
        problems.raise_all()
        assert started is not None
        start, note = started
        _save(start, target, source, model, force, dry_run)
        print(note, end="", file=sys.stderr)
        return 0
    problems.raise_all()
    from shardkit.wizard.run import WizardOptions, run_wizard

    return run_wizard(WizardOptions(model, output, force, dry_run, user, plain, no_input))


@app.command()
def validate(
    file: Annotated[
        Path | None, typer.Argument(help="The file; default: the one that launch would use.", **options.PATH)
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The same as PATH.", **options.PATH)] = None,
    as_json: options.AsJson = False,
) -> int:
    """Validate a file. Prints all problems, with line and column."""
    from shardkit.config.files import find, read

    if file is not None and config is not None:
        raise UsageError(f"config validate: two files (got {file} and --config {config}); give one.")
    path = file or config or find(Path.cwd())
    if path is None:
        raise UsageError(
            f"config validate: no shardkit.yaml in this folder or its parents; give the file{_of_accelerate()}."
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

    from shardkit.config.files import read, resolve

    problems = Problems()
    given = problems.of(_settings, settings)
    loaded = problems.of(resolve, file, given or {})
    names = problems.of(_names_below, key)
    other = None if diff is None else problems.of(read, diff)
    problems.raise_all()
    assert loaded is not None and names is not None
    name = loaded.path or f"no file; defaults for this machine{_of_accelerate()}"
    print(f"configuration: {name}", file=sys.stderr)
    if other is not None:
        names = config_text.differing(loaded.config, other.config, names)
    if as_json:
        data: dict[str, object] = config_text.data(loaded, names, origin)
        if other is not None:
            there = config_text.data(other, names, origin)
            data = {name: {"here": data[name], "other": there[name]} for name in names}
        print(json.dumps(to_jsonable_python(data), indent=2))
        return 0
    if other is not None:
        lines = config_text.difference(loaded, other, names, origin)
    elif origin:
        lines = config_text.origins(loaded, names, everything=key is not None)
    elif key is not None:
        lines = config_text.values(loaded.config, names)
    else:
        from shardkit.config.files import dump

        lines = dump(loaded.config, comments=False).splitlines()
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
    if to is not None:
        text = _for_accelerate(file)
    else:
        from shardkit.config.files import dump
        from shardkit.convert.read import convert as read_foreign

        conversion = read_foreign(file)
        _report(conversion, drop)
        text = dump(conversion.config)
    if output is None:
        print(text, end="")
    else:
        write_target(text, output, force)
        print(output)
    return 0


@app.command()
def schema() -> int:
    """Print the JSON Schema of shardkit.yaml. Editors complete and validate the file with it."""
    from shardkit.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _of_accelerate() -> str:
    """A hint at the user's Accelerate file, which is not used by default; empty if there is none."""
    from shardkit.config.files import accelerates_own

    found = accelerates_own()
    return f" (Accelerate's file {found} is only used if it is given)" if found else ""


def _settings(words: list[str] | None) -> dict[str, str]:
    from shardkit.config.command import settings_from

    return settings_from(words or [])


def _start(source: Path | None, template: str | None, settings: dict[str, str]) -> tuple["Config", str]:
    """(the configuration from the flags, a note on it)."""
    from shardkit.config import files

    if source is not None:
        from shardkit.convert.read import convert as read_foreign

        conversion = read_foreign(source)
        if conversion.is_foreign or conversion.refused:
            _report(conversion, drop=False)
        return files.overlaid(conversion.config, settings) if settings else conversion.config, ""
    if template is not None:
        from shardkit.templates import find

        start = files.read(find(template)).config
        return files.overlaid(start, settings) if settings else start, ""
    loaded = files.suggest(settings)
    return loaded.config, _note_on_device(loaded)


def _problem_of_model(model: str | None) -> str | None:
    """Why a text is not the name of a model, by its form; None if it may be one."""
    from shardkit.model import sources

    if model is None or (model and sources.has_form(model, Path.cwd())):
        return None
    return f"--model: not a model (got {model!r}); give {sources.FORMS}."


def _note_on_device(loaded: "LoadedConfig") -> str:
    """A note if use_cpu is true because this machine has no GPU. Raises UsageError with several machines, since the
    others may have GPUs."""
    config, origin = loaded.config, loaded.origins["use_cpu"]
    if origin.kind != "hardware" or not config.use_cpu:
        return ""
    if config.num_machines > 1:
        raise UsageError(
            f"config --defaults: use_cpu is unknown for {config.num_machines} machines (got no GPU on this one); "
            "add --set use_cpu=false for GPUs, or --set use_cpu=true."
        )
    return "note: use_cpu is true, because this machine has no GPU; for another machine add --set use_cpu=false.\n"


def _report(conversion: "Conversion", drop: bool) -> None:
    """Print the report on each key. Raises ConfigError if settings are not supported, unless `drop`."""
    from shardkit.convert.report import in_words, problems

    print(in_words(conversion), file=sys.stderr)
    if conversion.refused and not drop:
        raise ConfigError([*problems(conversion), "Nothing was written; change the file, or convert it with --drop."])


def _target(output: Path | None, user: bool) -> Path:
    from shardkit.config.files import user_path

    return user_path() if user else output or Path("shardkit.yaml")


def _save(start: "Config", target: Path, source: Path | None, model: str | None, force: bool, dry_run: bool) -> None:
    from shardkit.config.command import command_for
    from shardkit.config.files import dump, is_users, make_folder_of
    from shardkit.config.meaning import counts_devices
    from shardkit.model import comment

    model = model or comment.in_file(source)
    in_place = source is not None and target.exists() and source.resolve() == target.resolve()
    text = _edited(target, start) if in_place else dump(start, path=target)
    if model:
        text = comment.write(text, model)
    if dry_run:
        print(text, end="")
        return
    of_user = is_users(target)
    if of_user:
        make_folder_of(target)
    write_target(text, target, force)
    print(target)
    if not counts_devices(start):  # --defaults would write the number of this machine's devices
        print(f"to repeat this: {command_for(start, model, None if of_user else target, of_user)}")


def _edited(path: Path, config: "Config") -> str:
    from shardkit.config.edit import edited
    from shardkit.config.files import text_of_file

    return edited(text_of_file(path), config)


def target_problem(target: Path, force: bool) -> str | None:
    """Why no file can be written there; None if it can."""
    from shardkit.config.files import why_no_file

    if problem := why_no_file(target):
        return problem
    if target.exists() and not force:
        return f"{target}: exists; replace it with --force (the old one is kept), or choose another --output."
    return None


def write_target(text: str, target: Path, force: bool) -> None:
    """Write a file. An existing one is kept as .bak. Raises UsageError for a `target_problem`."""
    from shardkit.config.files import replace_text

    problem = target_problem(target, force)
    if problem is not None:
        raise UsageError(problem)
    replace_text(text, target)


def _for_accelerate(file: Path) -> str:
    from shardkit.config.files import read
    from shardkit.convert.to_accelerate import to_accelerate

    text, lost = to_accelerate(read(file).config)
    for line in lost:
        print(f"lost: {line}", file=sys.stderr)
    return text


def _names_below(key: str | None) -> list[str]:
    """The settings below a key, which may be a YAML or a Python name; all without a key."""
    from shardkit.config.keys import all_keys, resolve_name, suggestion_for_dotted

    path = () if key is None else resolve_name(key)
    if path is None and Path(str(key)).is_file():
        raise UsageError(f"config show: a file is not a setting (got {key}); write --config {key}.")
    if path is None:
        raise UsageError(f"config show: unknown setting (got {key}); {suggestion_for_dotted(str(key))}")
    return [name.name for place, name in all_keys().items() if place[: len(path)] == path]
