"""Settings objects: `Accelerator(kwargs_handlers=[...], fsdp_plugin=..., dataloader_config=...)`.

A settings object has a method `shardkit_settings() -> dict` of dotted names and values as in the YAML, such as
"fsdp_config.fsdp_offload_params" or "shardkit.ddp.comm_hook". It returns only values that the user set: they must not
contradict shardkit.yaml, `--set` or another object. This module knows no class of such objects.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardkit.config.code import Given
from shardkit.errors import ConfigError

# Accelerator's arguments that take a settings object, and the block of the YAML with the same settings.
ARGUMENTS = {
    "fsdp_plugin": "fsdp_config",
    "dataloader_config": "shardkit.data",
    "gradient_accumulation_plugin": "shardkit.gradient_accumulation_steps",
    "parallelism_config": "shardkit.mesh",
    "dynamo_plugin": "shardkit.compile",
}


def read(arguments: Mapping[str, Any], handlers: Sequence[Any]) -> list[Given]:
    """The settings of Accelerator's settings objects. Raises ConfigError with all arguments that are not settings
    objects."""
    named = [(name, value, ARGUMENTS[name]) for name, value in arguments.items()]
    named += [("kwargs_handlers", value, "shardkit") for value in handlers]
    found = [one for one in named if one[1] is not None]
    if problems := [_problem(*one) for one in found if not says_settings(one[1])]:
        raise ConfigError(problems)
    return [said_by(value, name) for name, value, _ in found]


def handlers_of(kwargs_handlers: Any) -> tuple[Any, ...]:
    """The objects given as `Accelerator(kwargs_handlers=...)`. Raises ConfigError where that is not a list."""
    if kwargs_handlers is None or isinstance(kwargs_handlers, Iterable):
        return tuple(kwargs_handlers or ())
    raise ConfigError(
        f"Accelerator(kwargs_handlers=...): must be a list of settings objects (got {type(kwargs_handlers).__name__}); "
        "put it in brackets: kwargs_handlers=[...]."
    )


def says_settings(value: Any) -> bool:
    """Whether it is a settings object."""
    return callable(getattr(value, "shardkit_settings", None)) and not isinstance(value, type)


def said_by(value: Any, argument: str) -> Given:
    """The settings of one object, with its name in errors and in the table at the start."""
    where = f"Accelerator({argument}={type(value).__name__})"
    said = value.shardkit_settings()
    if not isinstance(said, Mapping) or not all(isinstance(name, str) for name in said):
        raise ConfigError(
            f"{where}: shardkit_settings() must return a dict of settings by name (got {type(said).__name__}); "
            'return one such as {"shardkit.compile": True}.'
        )
    return Given(where, said)


def foreign_text(value: Any) -> str | None:
    """The error text for an object of the package accelerate; None for any other."""
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__.partition(".")[0] != "accelerate":
        return None
    return (
        f"is an object of the package accelerate (got {kind.__module__}.{kind.__qualname__}); "
        f"use shardkit.compat.{kind.__qualname__}"
    )


def _problem(name: str, value: Any, block: str) -> str:
    where = f"Accelerator({name}=...)"
    if text := foreign_text(value):
        return f"{where}: {text}, or write its settings into shardkit.yaml under {block}."
    what = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    return (
        f"{where}: is not a settings object (got {what}); write the settings into shardkit.yaml under {block}, or "
        "give an object with a method shardkit_settings() -> {name: value}."
    )
