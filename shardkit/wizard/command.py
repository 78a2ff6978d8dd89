"""The one line that gives the same file without a question."""

import json
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from shardkit.config import suggested
from shardkit.config.hardware import Hardware
from shardkit.config.keys import Key, all_keys
from shardkit.config.schema import Config


def equal_command(config: Config, hardware: Hardware, model: str | None, output: Path | None) -> str:
    """`shardkit config --defaults --set ...`: what differs from the defaults, and what depends on the machine."""
    words = ["shardkit", "config", "--defaults"]
    words += [word for name, value in settings(config, hardware).items() for word in ("--set", f"{name}={value}")]
    words += ["--model", model] if model else []
    words += ["--output", str(output)] if output else []
    return " ".join(shlex.quote(word) for word in words)


def settings(config: Config, hardware: Hardware) -> dict[str, str]:
    """The values that must be named to get `config` from the defaults of any machine."""
    depends_on_machine = set(suggested.for_hardware(hardware)) | {("num_machines",), ("num_processes",)}
    return {
        key.name: _word(value)
        for key, value in _values(config)
        if key.path in depends_on_machine or value != _plain(key.default)
    }


def _values(config: Config) -> Iterator[tuple[Key, Any]]:
    for key in all_keys().values():
        value: Any = config
        for part in key.path:
            value = getattr(value, part)
        yield key, _plain(value)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)
