"""What `shardkit config` does without questions: from flags to a file, and from one tool's file to another's."""

import sys
from pathlib import Path

from shardkit import templates
from shardkit.config import edit, files
from shardkit.config.command import command_for
from shardkit.config.files import LoadedConfig
from shardkit.config.keys import all_keys, resolve_name, suggestion_for_dotted
from shardkit.config.meaning import counts_devices
from shardkit.config.schema import Config
from shardkit.convert import read
from shardkit.convert import report as conversions
from shardkit.convert.report import Conversion
from shardkit.convert.to_accelerate import to_accelerate
from shardkit.errors import ConfigError, UsageError
from shardkit.model import comment, sources


def start_from(source: Path | None, template: str | None, settings: dict[str, str]) -> tuple[Config, str]:
    """(the configuration that the flags start from, changed by `settings`; a note on it)."""
    if source is None and template is None:
        loaded = files.suggest(settings)
        return loaded.config, _note_on_device(loaded)
    if source is not None:
        conversion = read.convert(source)
        start = conversion.config
        if conversion.is_foreign or conversion.refused:
            report(conversion, drop=False)
    else:
        start = files.read(templates.find(str(template))).config
    return files.overlaid(start, settings) if settings else start, ""


def _note_on_device(loaded: LoadedConfig) -> str:
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


def problem_of_model(model: str | None) -> str | None:
    """Why a text is not the name of a model, by its form; None if it may be one."""
    if model is None or (model and sources.has_form(model, Path.cwd())):
        return None
    return f"--model: not a model (got {model!r}); give {sources.FORMS}."


def target_of(output: Path | None, user: bool) -> Path:
    return files.user_path() if user else output or Path("shardkit.yaml")


def save(start: Config, target: Path, source: Path | None, model: str | None, force: bool, dry_run: bool) -> None:
    """Write the file, or print it in a dry run. A file that is its own source keeps its comments and order."""
    model = model or comment.in_file(source)
    in_place = source is not None and target.exists() and source.resolve() == target.resolve()
    text = edit.edited(files.text_of_file(target), start) if in_place else files.dump(start, path=target)
    if model:
        text = comment.write(text, model)
    if dry_run:
        print(text, end="")
        return
    of_user = files.is_users(target)
    if of_user:
        files.make_folder_of(target)
    write_target(text, target, force)
    print(target)
    if not counts_devices(start):  # --defaults would write the number of this machine's devices
        print(f"to repeat this: {command_for(start, model, None if of_user else target, of_user)}")


def target_problem(target: Path, force: bool) -> str | None:
    """Why no file can be written there; None if it can."""
    if problem := files.why_no_file(target):
        return problem
    if target.exists() and not force:
        return f"{target}: exists; replace it with --force (the old one is kept), or choose another --output."
    return None


def write_target(text: str, target: Path, force: bool) -> None:
    """Write a file. An existing one is kept as .bak. Raises UsageError for a `target_problem`."""
    problem = target_problem(target, force)
    if problem is not None:
        raise UsageError(problem)
    files.replace_text(text, target)


def from_tool(file: Path, drop: bool) -> str:
    """The file of another tool as a shardkit.yaml."""
    conversion = read.convert(file)
    report(conversion, drop)
    return files.dump(conversion.config)


def for_accelerate(file: Path) -> str:
    """The file as one for Accelerate; what that cannot express is printed."""
    text, lost = to_accelerate(files.read(file).config)
    for line in lost:
        print(f"lost: {line}", file=sys.stderr)
    return text


def report(conversion: Conversion, drop: bool) -> None:
    """Print the report on each key. Raises ConfigError if settings are not supported, unless `drop`."""
    print(conversions.in_words(conversion), file=sys.stderr)
    if conversion.refused and not drop:
        raise ConfigError(
            [*conversions.problems(conversion), "Nothing was written; change the file, or convert it with --drop."]
        )


def names_below(key: str | None) -> list[str]:
    """The settings below a key, which may be a YAML or a Python name; all without a key."""
    path = () if key is None else resolve_name(key)
    if path is None and Path(str(key)).is_file():
        raise UsageError(f"config show: a file is not a setting (got {key}); write --config {key}.")
    if path is None:
        raise UsageError(f"config show: unknown setting (got {key}); {suggestion_for_dotted(str(key))}")
    return [name.name for place, name in all_keys().items() if place[: len(path)] == path]


def hint_at_accelerate() -> str:
    """A hint at the user's Accelerate file, which is not used by default; empty if there is none."""
    found = files.accelerates_own()
    return f" (Accelerate's file {found} is only used if it is given)" if found else ""
