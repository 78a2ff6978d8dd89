"""The configuration of a script: the launcher's, or the one found from the working folder, with the script's
arguments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from shardkit import env
from shardkit.config import files, meaning
from shardkit.config.code import Given, with_given
from shardkit.config.schema import Config, MixedPrecision, read_precision
from shardkit.config.validation import built_in_python
from shardkit.distributed.process import launched
from shardkit.errors import ConfigError
from shardkit.launch import names
from shardkit.log import get_logger

log = get_logger(__name__)

# Set by the launcher, so that a configuration given in code does not override it.
LAUNCHED = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "use_cpu")


@dataclass(frozen=True)
class Settings:
    """A configuration, and where each explicitly set value comes from, by its name in Python."""

    config: Config
    chosen: dict[str, str]

    def with_given(self, given: Sequence[Given]) -> "Settings":
        """With the values of settings objects. Raises ConfigError where they contradict values set before."""
        if not given:
            return self
        config, chosen, notes = with_given(self.config, self.chosen, given)
        for note in notes:
            log.info("%s", note)
        return Settings(config, chosen)

    def replaced(self, name: str, value: Any, where: str) -> "Settings":
        """With one value changed by `where`; logs it where another value was set explicitly."""
        before = attrgetter(name)(self.config)
        if before != value and name in self.chosen:
            log.info("%s: %s from %s replaces %s from %s.", name, value, where, before, self.chosen[name])
        return Settings(with_value(self.config, name, value), self.chosen | {name: where})


def settings(
    given: Config | Mapping[str, Any] | str | Path | None,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int | None = None,
    cpu: bool | None = None,
    split_batches: bool | None = None,
    even_batches: bool | None = None,
) -> Settings:
    """The configuration for this process: `given`, else the launcher's, else the file found from the working folder;
    with the arguments applied. Raises ConfigError with all problems."""
    found = _from_code(given) if given is not None else _from_outside()
    _check_arguments(mixed_precision, gradient_accumulation_steps)
    _check_flags({"cpu": cpu, "split_batches": split_batches, "even_batches": even_batches})
    for argument, name, value in (
        ("mixed_precision", "mixed_precision", read_precision(mixed_precision)),
        ("gradient_accumulation_steps", "shardkit.gradient_accumulation_steps", gradient_accumulation_steps),
        ("cpu", "use_cpu", cpu),
        ("split_batches", "shardkit.data.split_batches", split_batches),
        ("even_batches", "shardkit.data.even_batches", even_batches),
    ):
        if value is not None:
            found = found.replaced(name, value, f"Accelerator({argument}=...)")
    _warn_of_accelerate_launch(found.config)
    return found


def _warn_of_accelerate_launch(config: Config) -> None:
    """Warns of settings of `accelerate launch` that this run does not use: its variables are not read."""
    if env.resolved_config_path() is not None or launched().rank != 0:
        return
    precision = env.get("ACCELERATE_MIXED_PRECISION") or "no"
    steps = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") or "1"
    asked = [
        *([f"mixed_precision {precision}"] if precision not in ("no", config.mixed_precision) else []),
        *([f"{steps} micro-batches"] if steps not in ("1", str(config.shardkit.gradient_accumulation_steps)) else []),
        *(["FSDP settings"] if env.is_true("ACCELERATE_USE_FSDP") else []),
        *(["DeepSpeed settings"] if env.is_true("ACCELERATE_USE_DEEPSPEED") else []),
    ]
    if asked:
        log.warning(
            "settings: accelerate launch was given %s, which is not read here; start with `shardkit launch` (it "
            "reads Accelerate's file with --config FILE), or set it in shardkit.yaml or in Accelerator(...).",
            ", ".join(asked),
        )


def with_kept_batch(found: Settings) -> Settings:
    """In a world of an elastic run without all its machines: with as many micro-batches in a step as keep the global
    batch."""
    section = found.config.shardkit
    name, steps = "shardkit.gradient_accumulation_steps", section.gradient_accumulation_steps
    kept = kept_accumulation(steps, section.data.split_batches)
    if kept == steps:
        return found
    world = f"shardkit launch ({launched().world_size} of {full_world_size()} ranks)"
    return Settings(with_value(found.config, name, kept), found.chosen | {name: world})


def full_world_size() -> int | None:
    """The ranks of an elastic run with all its machines; None in other runs."""
    return int(env.get(names.FULL_WORLD_SIZE) or 0) or None


def kept_accumulation(steps: int, split_batches: bool) -> int:
    """The micro-batches per step and rank here, for `steps` in the full world of an elastic run; else `steps`.

    Raises ConfigError where that is not a whole number.
    """
    world = launched().world_size
    full = full_world_size() or world
    kept = meaning.kept_accumulation(steps, split_batches, full, world)
    if kept is None:
        raise ConfigError(
            f"gradient_accumulation_steps: {steps} micro-batches on {full} ranks are not a whole number on {world} "
            f"(got {steps * full / world:.2f}); set them in shardkit.yaml: then only worlds that they fit are used."
        )
    return kept


def check_accumulation(steps: int) -> None:
    """Raises ConfigError where `steps` is not a number of micro-batches."""
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(
            f"gradient_accumulation_steps: must be an integer of at least 1 (got {steps!r}); "
            "use 1 for one step per micro-batch."
        )


def with_value(config: Config, name: str, value: Any) -> Config:
    """The configuration with one setting changed."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return config.changed(**value)


def _from_outside() -> Settings:
    """The launcher's configuration, whose notes it has printed; else the one found from the working folder."""
    path = env.resolved_config_path()
    if path is not None:
        loaded = files.read(path)
        chosen = _chosen_beside(path)
        return Settings(loaded.config, loaded.chosen if chosen is None else chosen)
    loaded = files.resolve(ranks=launched().world_size)
    for note in loaded.notes:
        log.info("%s", note)
    return Settings(loaded.config, loaded.chosen)


def _from_code(given: Config | Mapping[str, Any] | str | Path) -> Settings:
    if isinstance(given, Config):
        chosen = _set_names(given)
        if "num_processes" not in chosen:  # checks across keys need the world size
            given = given.changed(num_processes=launched().world_size)
        config, notes = built_in_python(given)
        for note in notes:
            log.info("%s", note)
        found = Settings(config, dict.fromkeys(chosen, "Accelerator(config=...)"))
    elif isinstance(given, Mapping):
        # Checks across keys need the world size, which the launcher sets where the code does not.
        whole = {"num_processes": launched().world_size, **given}
        loaded = files.read_text(json.dumps(whole, default=_plain), "Accelerator(config=...)")
        chosen = [name for name in loaded.chosen if name in given or name != "num_processes"]
        found = Settings(loaded.config, dict.fromkeys(chosen, "Accelerator(config=...)"))
    elif isinstance(given, (str, PathLike)):
        loaded = files.resolve(Path(given), ranks=launched().world_size)
        found = Settings(loaded.config, loaded.chosen)
    else:
        raise ConfigError(
            f"Accelerator(config=...): expected settings, or the path of a file (got {type(given).__name__}); give a "
            "dict by the names of shardkit.yaml, a shardkit.Config, or a path."
        )
    return _with_launch(found)


def _plain(value: Any) -> Any:
    """A value of a dict as JSON has it: sections may be of any class of mappings."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _with_launch(found: Settings) -> Settings:
    """Under the launcher: with its world, unless the code sets one."""
    path = env.resolved_config_path()
    if path is None:
        return found
    launchers, config, chosen = files.read(path).config, found.config, dict(found.chosen)
    for name in LAUNCHED:
        if name not in chosen:
            config = with_value(config, name, attrgetter(name)(launchers))
            chosen[name] = "shardkit launch"
    return Settings(config, chosen)


def _chosen_beside(path: Path) -> dict[str, str] | None:
    """Where the launcher's values come from, from a file next to the resolved configuration; None if there is none."""
    beside = path.with_suffix(".chosen.json")
    return json.loads(beside.read_text()) if beside.exists() else None


def _set_names(section: BaseModel, prefix: str = "") -> list[str]:
    """Dotted names of the fields that were set in a configuration built in Python."""
    names: list[str] = []
    for name in section.model_fields_set:
        value = getattr(section, name)
        names += _set_names(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else [prefix + name]
    return names


def _check_arguments(mixed_precision: str | None, gradient_accumulation_steps: int | None) -> None:
    if mixed_precision is not None and read_precision(mixed_precision) not in get_args(MixedPrecision):
        raise ConfigError(
            f"Accelerator(mixed_precision=...): unknown precision (got {mixed_precision!r}); "
            "use no, fp16, bf16, fp8 or mxfp8."
        )
    if gradient_accumulation_steps is not None:
        check_accumulation(gradient_accumulation_steps)


def _check_flags(arguments: Mapping[str, bool | None]) -> None:
    """Raises ConfigError where one is neither true nor false: the text "false" would be true."""
    problems = [
        f"Accelerator({name}=...): must be True or False (got {value!r}); convert it."
        for name, value in arguments.items()
        if value is not None and value not in (True, False)
    ]
    if problems:
        raise ConfigError(problems)
