"""Settings as command-line words: parsing them, and writing a configuration as a command."""

import shlex
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

from shardkit.config.files import find
from shardkit.config.keys import Path, all_keys, value_at
from shardkit.config.layers import NOTHING
from shardkit.config.schema import Config
from shardkit.config.yaml_text import quoted, scalar_text, value_text
from shardkit.errors import UsageError

# Settings that `--defaults` takes from the hardware; written out, so that the command means the same elsewhere.
_FROM_HARDWARE = ["distributed_type", "num_machines", "num_processes", "mixed_precision", "use_cpu"]


def settings_from(words: Sequence[str]) -> dict[str, str]:
    """The KEY=VALUE words of `--set`; later ones win. Raises UsageError with all words of another form."""
    wrong = [word for word in words if not word.partition("=")[0].strip() or "=" not in word]
    if wrong:
        raise UsageError("\n".join(f"--set: is not KEY=VALUE (got {word!r}); write --set KEY=VALUE." for word in wrong))
    return {key.strip(): value for key, _, value in (word.partition("=") for word in words)}


def command_for(config: Config, model: str | None, output: File | None, is_user: bool) -> str:
    """The command that writes the same file again, without questions. `model`: the one that the file names; `output`:
    None for a file that needs no name; `is_user`: whether it is the user's file for all projects."""
    words = [f"--set {shlex.quote(f'{name}={text}')}" for name, text in settings_of(config).items()]
    words += [f"-o {shlex.quote(str(output))}"] if output is not None else []
    words += ["--force", *([f"--model {shlex.quote(model)}"] if model else []), *(["--user"] if is_user else [])]
    return " ".join(["shardkit config --defaults", *words])


def config_flag(path: File) -> str:
    """` --config PATH` for a file that commands do not find from this folder; else an empty string."""

    found = find(File.cwd())
    if found is not None and found.resolve() == path.resolve():
        return ""
    return f" --config {shlex.quote(str(path))}"


def settings_of(config: Config) -> dict[str, str]:
    """The settings that differ from their defaults, and those that depend on the machine, as words for `--set`."""
    return {
        key.name: setting_text(path, value_at(config, path))
        for path, key in all_keys().items()
        if value_at(config, path) != key.default or key.name in _FROM_HARDWARE
    }


def setting_text(path: Path, value: Any) -> str:
    """A value as one word that `--set` reads back."""
    if isinstance(value, (list, dict)):
        text = value_text(path, value)
        return text.strip('"') if path == ("fsdp", "transformer_layer_cls_to_wrap") else text
    if not isinstance(value, str):
        return scalar_text(value)
    text = str(getattr(value, "value", value))
    return quoted(text) if text.strip().lower() in NOTHING or text.startswith('"') else text
