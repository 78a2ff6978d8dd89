"""Settings given in code, on top of a configuration: checked as in a file, and never overriding a value set
elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import ValidationError

from shardkit.config.keys import Path, all_keys, resolve_name, sections, value_at
from shardkit.config.layers import Layer, Origin, SettingEntry, unknown_setting
from shardkit.config.schema import Config
from shardkit.config.validation import build
from shardkit.errors import ConfigError

# Read by the launcher, or before the script's own code runs.
_FIXED = {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"}
_FIXED |= {"gpu_ids", "enable_cpu_affinity", "compute_environment"}


@dataclass(frozen=True)
class Given:
    """The settings of one object in a script, by dotted name as in the YAML or in Python. `where` names the object."""

    where: str
    settings: Mapping[str, Any]


def with_given(
    config: Config, chosen: Mapping[str, str], given: Sequence[Given]
) -> tuple[Config, dict[str, str], list[str]]:
    """The configuration with the objects' settings, where each set value comes from (`chosen`, extended), and notes.

    Raises ConfigError with all problems: unknown names, invalid values, failed checks across settings, and values that
    contradict a file, the command line or another object.
    """
    layer = _layer_of(config, chosen)
    for one in given:
        for name, value in one.settings.items():
            _add(layer, one.where, name, value)
    found, origins = build(layer)
    if layer.problems:
        raise ConfigError(layer.problems)
    grown = {name: str(origin) for name, origin in origins.items() if origin.kind == "code"}
    return found, {**chosen, **grown}, layer.notes


def _layer_of(config: Config, chosen: Mapping[str, str]) -> Layer:
    """The configuration as entries: set values, and values that differ from the defaults."""
    layer = Layer()
    for path, key in all_keys().items():
        value = value_at(config, path)
        if key.name in chosen:
            layer.entries[path] = SettingEntry(value, Origin("code", chosen[key.name]), key.yaml_name)
        elif value != key.default:
            layer.entries[path] = SettingEntry(value, Origin("hardware", "what was found"), key.yaml_name)
    return layer


def _add(layer: Layer, where: str, name: str, value: Any) -> None:
    path = resolve_name(name)
    if path is None or path in sections():
        layer.problems.append(f"{where}: {unknown_setting(name, path)}")
        return
    key = all_keys()[path]
    if name in _FIXED or (path[:2] == ("shardkit", "launch") and path[2] != "process_group_timeout_s"):
        text = f"is read before the script runs (got {_shown(value)}); set it in shardkit.yaml or at launch."
        layer.problems.append(f"{where}: {key.yaml_name}: {text}")
        return
    there = layer.entries.get(path)
    if there is not None and there.origin.kind == "code" and value is not None:
        before, after = _canonical(path, there.value), _canonical(path, value)
        if before != after:
            layer.problems.append(
                f"{where}: {key.yaml_name}: {_shown(after)} here, but {_shown(before)} from {there.origin}; "
                "keep one of them."
            )
        return
    layer.entries[path] = SettingEntry(value, Origin("code", where), key.yaml_name)


def _canonical(path: Path, value: Any) -> Any:
    """The value as the schema reads it; unchanged where it is invalid, which `build` reports."""
    block: Any = value
    for part in reversed(path):
        block = {part: block}
    try:
        return value_at(Config.model_validate(block), path)
    except ValidationError:
        return value


def _shown(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)
