"""Launch flags as settings: keys of the YAML with their values as text."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.config import document, host_port
from shardkit.config.command import settings_from
from shardkit.config.layers import FlagValue, clashes
from shardkit.config.scheduler import machine_range
from shardkit.config.schema import ShardingStrategy
from shardkit.digits import number_in
from shardkit.errors import ConfigError, UsageError
from shardkit.problems import Problems

_STRATEGIES = [strategy.value.lower() for strategy in ShardingStrategy]


@dataclass(frozen=True)
class Switches:
    """The flags of `shardkit launch` that are not settings. `meaning`: the words of --accelerates-meaning."""

    no_prefix: bool = False
    measure: bool = False
    force: bool = False
    as_accelerate: bool = False
    meaning: tuple[str, ...] = ()

    @property
    def given(self) -> list[str]:
        """The names of the flags that are set."""
        flags = {
            "--no-prefix": self.no_prefix,
            "--measure": self.measure,
            "--force": self.force,
            "--as-accelerate": self.as_accelerate,
            "--accelerates-meaning": self.meaning,
        }
        return [name for name, value in flags.items() if value]

    @property
    def words(self) -> list[str]:
        """The flags as they are written in a command."""
        return [*self.given, ",".join(self.meaning)] if self.meaning else self.given


def words_in(texts: Sequence[str] | None) -> tuple[str, ...]:
    """The words of a flag with a list, `a,b`, which may be repeated; each once."""
    words = [word for text in texts or () for word in text.replace(" ", "").split(",")]
    return tuple(dict.fromkeys(filter(None, words)))


def read_all(
    plain: Mapping[str, str | None],
    *given: tuple[Callable[[Any], dict[str, str]], Any],
    settings: Sequence[str] | None = None,
) -> tuple[dict[str, str], Problems]:
    """The settings in flags, and the problems of all flags. `plain`: {setting: value, None: not given}; `given`: flags
    that a function reads; `settings`: those of `--set`. Later ones of one flag take precedence; different flags that
    contradict each other are a problem."""
    found = {name: value for name, value in plain.items() if value is not None}
    problems = Problems()
    for name, value in list(found.items()):
        if not value.strip():
            problems.add(_without_value(getattr(found.pop(name), "flag", name)))
    for read, argument in (*given, *((settings_from, [one]) for one in settings or [])):
        more = (problems.of(read, argument) if argument is not None else None) or {}
        problems.lines += clashes(found, more)
        found |= more
    return found, problems


def _without_value(flag: str) -> str:
    return f"{flag}: has no value (got an empty text, as from a variable that is not set); write one."


def fsdp_settings(text: str) -> dict[str, str]:
    """The Trainer's `--fsdp "full shard auto_wrap offload"`: a strategy, how to wrap, where to keep parameters."""
    words = "_".join(re.split(r"[\s,\-_]+", text.strip().lower()))
    if words in {"", "false", "no", "none"}:
        return {}
    found: dict[str, str] = {"distributed_type": "FSDP"}
    for part, settings in _PARTS.items():
        without = re.sub(rf"(^|_){part}(?=_|$)", "", words)
        if without != words and settings.keys().isdisjoint(found.keys() - {"distributed_type"}):
            found |= settings
            words = without
    left = words.strip("_").replace("true", "").strip("_")
    if left:
        raise UsageError(
            f"--fsdp: is not a strategy and options (got {text!r}, of which {left!r} is unknown); "
            f"use {', '.join(_STRATEGIES)}, with auto_wrap, offload."
        )
    return _given_by("--fsdp", found)


def fsdp_file_settings(path: Path) -> dict[str, str]:
    """The Trainer's `--fsdp_config FILE` (JSON or YAML, with or without the prefix fsdp_), or an Accelerate file.

    A folder stands for the one such file in it.
    """
    file = _the_file_in(path)
    content = _read(file)
    block = content.get("fsdp_config", content)
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"--fsdp-config: {file}: fsdp_config is not a block of keys (got {block!r}); write its keys below it."
        )
    settings: dict[str, str] = {}
    for key, value in ((str(key), value) for key, value in block.items()):
        if key.removeprefix("fsdp_") == "min_num_params" and value == 0:
            continue  # the Trainer's default: not by size
        is_xla = key == "xla" or key.startswith("xla_")
        name = key if is_xla else f"fsdp_config.{key if key.startswith('fsdp_') else f'fsdp_{key}'}"
        settings |= _given_by(f"--fsdp-config {file}: {key}", {name: _as_text(value)})
    return settings


def main_settings(address: str) -> dict[str, str]:
    """`--main HOST:PORT`, `--main HOST`, `--main :PORT`."""
    host, port = host_port.split(address)
    if not (host.strip() or port):
        raise UsageError(_without_value("--main"))
    number = number_in(port)
    if port and (number is None or number > 65535):
        raise UsageError(
            f"--main: is not HOST:PORT with a port up to 65535 (got {address!r}); write HOST:PORT, HOST or :PORT."
        )
    settings = {"main_process_ip": host} if host else {}
    return _given_by("--main", settings | ({"main_process_port": port} if port else {}))


def machines_settings(text: str) -> dict[str, str]:
    """`--num-machines N`, or MIN:MAX for an elastic run."""
    if not text.strip():
        raise UsageError(_without_value("--num-machines"))
    if ":" not in text:
        return _given_by("--num-machines", {"num_machines": text})
    found = machine_range(text)
    if found is None:
        raise UsageError(
            f"--num-machines: is not a number, nor MIN:MAX (got {text!r}); write 4, or 2:4 for an elastic run."
        )
    least, most = found
    return _given_by("--num-machines", {"num_machines": str(most), "shardkit.launch.min_machines": str(least)})


def _given_by(flag: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {name: FlagValue(value, flag) for name, value in settings.items()}


def _the_file_in(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(file for suffix in ("json", "yaml", "yml") for file in path.glob(f"*.{suffix}"))
    if len(found) == 1:
        return found[0]
    have = f"{len(found)}: {', '.join(file.name for file in found[:5])}" if found else "none"
    raise ConfigError(
        f"--fsdp-config: {path} is a folder and should hold one JSON or YAML file (got {have}); name the file."
    )


def _read(file: Path) -> Mapping[str, Any]:
    name = f"--fsdp-config: {file}"
    try:
        with file.open("rb") as stream:
            text = document.decode(stream.read(document.MAX_BYTES + 1), name)
        if not re.sub("(?m)#.*$", "", text).strip():
            raise ConfigError(f"{name} is empty; write settings into it, or leave the flag out.")
        is_json = file.suffix == ".json"
        content = json.loads(text) if is_json else document.typed(document.compose(text, name), name)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON ({' '.join(str(error).split())}); correct it.") from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name}: is not a block of keys (got {type(content).__name__}); write `key: value` lines.")
    return content


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return json.dumps(value) if isinstance(value, Mapping) else "null" if value is None else str(value)


_PARTS: dict[str, dict[str, str]] = {
    # From the last on, so that hybrid_shard is not found in hybrid_shard_zero2.
    **{name: {"fsdp_config.fsdp_sharding_strategy": name.upper()} for name in reversed(_STRATEGIES)},
    "auto_wrap": {"fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "offload": {"fsdp_config.fsdp_offload_params": "true"},
}
