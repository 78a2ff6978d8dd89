"""Configuration files: finding, reading and writing them.

resolve()   flags > environment > file > hardware defaults > defaults, with the origin of every value
read()      one file, without anything else
dump()      a Config as commented YAML, which reads back as the same Config
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from shardkit import env
from shardkit.config import document, hardware_defaults, validation, yaml_text
from shardkit.config.keys import KNOWN, all_keys, value_at
from shardkit.config.layers import Layer, Origin, combine, environment_layer, file_layer, flag_layer
from shardkit.config.schema import Config
from shardkit.digits import number_in
from shardkit.errors import ConfigError, UsageError

NAMES = ("shardkit.yaml", "shardkit.yml")
ACCELERATE_NAMES = ("accelerate.yaml", "accelerate.yml", "accelerate_config.yaml", "default_config.yaml")
_OF_A_MACHINE = {"machine_rank", "main_process_ip", "gpu_ids"}
_OF_ITS_RANKS = ("log_dir", "bind_address", "show", "start", "threads_per_rank")
_OF_A_MACHINE |= {f"shardkit.launch.{name}" for name in _OF_ITS_RANKS}
ELSEWHERE = "choose another file with --output"


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the origin of each value by its name in Python, notes, and its file if any."""

    config: Config
    origins: dict[str, Origin] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    path: Path | None = None

    @property
    def chosen(self) -> dict[str, str]:
        """Where each value comes from that somebody has set, by the setting's name in Python."""
        return {name: str(one) for name, one in self.origins.items() if one.kind not in ("default", "hardware")}


def load_config(path: Path | str | None = None, settings: Mapping[str, str] | None = None) -> Config:
    """The configuration that a run would have: on a rank the launcher's; else that of `path`, or of the file that is
    found, with `settings` ({"num_processes": "4"}) in place of its values. Raises ConfigError."""
    resolved = env.resolved_config_path()
    if path is None and resolved is not None and not settings:
        return read(resolved).config
    return resolve(Path(path) if path is not None else resolved, settings or {}).config


def find(start: Path) -> Path | None:
    """The configuration file for a folder: $SHARDKIT_CONFIG, shardkit.yaml there or above it up to the project root, an
    Accelerate file there, or the user's file (from `shardkit config --user`)."""
    chosen = env.config_path()
    if chosen is not None:
        return chosen
    start = start.resolve()
    candidates = [folder / name for folder in _up_to_root(start) for name in NAMES]
    candidates += [start / name for name in ACCELERATE_NAMES if _is_accelerates(start / name)]
    with contextlib.suppress(UsageError):
        candidates.append(user_path())
    return next((path for path in candidates if os.path.isfile(path)), None)


def user_path() -> Path:
    """The path of the user's file, written by `shardkit config --user`."""
    folder = env.users_folder("XDG_CONFIG_HOME", ".config")
    if folder is None:
        raise UsageError("config: --user needs a home folder, and there is none; use --output.")
    return folder / "shardkit" / "config.yaml"


def is_users(path: Path) -> bool:
    """Whether this is the path of the user's file; False where there is no home folder."""
    with contextlib.suppress(UsageError):
        return path == user_path()
    return False


def accelerates_own() -> Path | None:
    """The file that `accelerate config` writes in the user's cache, if there is one. It is read only when named."""
    home, cache = env.get("HF_HOME"), env.users_folder("XDG_CACHE_HOME", ".cache")
    folder = Path(home) if home else cache and cache / "huggingface"
    if folder is None:
        return None
    places = [folder / "accelerate" / f"default_config.{suffix}" for suffix in ("yaml", "yml", "json")]
    return next((path for path in places if os.path.isfile(path)), None)  # False in a home folder of another user


def read(path: Path | str) -> LoadedConfig:
    """The configuration in one file; missing keys have their defaults. Raises ConfigError with all problems."""
    return _loaded(_file_layer(Path(path)), Path(path))


def read_text(text: str, name: str = "shardkit.yaml") -> LoadedConfig:
    """As `read`, from a text."""
    return _loaded(file_layer(text, name), None)


def resolve(
    path: Path | None = None,
    settings: Mapping[str, str] | None = None,
    folder: Path | None = None,
    defaults_for_hardware: bool = True,
    ranks: int | None = None,
) -> LoadedConfig:
    """The configuration of a run here: settings over environment over the file over hardware defaults. Without a path
    the file is searched from the folder. `ranks`: how many run already, which counts more than the number of devices
    does. Raises ConfigError with all problems."""
    path = path or find(folder or Path.cwd())
    given = [_without_address(_file_layer(path))] if path else []
    given += [environment_layer(), flag_layer(settings or {})]
    if defaults_for_hardware:
        given.insert(0, hardware_defaults.hardware_layer(combine(given).entries, path is not None, ranks))
    return _loaded(combine(given), path)


def readable_part(path: Path | None, settings: Mapping[str, str]) -> LoadedConfig:
    """What `resolve` would give without what is wrong in it, of which a file that cannot be read is a part."""
    given = [environment_layer(), flag_layer(settings)]
    with contextlib.suppress(ConfigError):
        if path := path or find(Path.cwd()):
            given.insert(0, _without_address(_file_layer(path)))
    given.insert(0, hardware_defaults.hardware_layer(combine(given).entries, path is not None))
    config, origins = validation.build(combine(given))
    return LoadedConfig(config, origins, path=path)


def suggest(settings: Mapping[str, str] | None = None) -> LoadedConfig:
    """Hardware defaults with the given settings: what `shardkit config --defaults` writes."""
    given = combine([environment_layer(), flag_layer(settings or {})])
    return _loaded(combine([hardware_defaults.hardware_layer(given.entries, has_file=False), given]), None)


def overlaid(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with some settings changed, `{"fsdp.offload_params": True}`, checked as a file."""
    return _loaded(
        combine([file_layer(dump(config, comments=False), "configuration"), flag_layer(settings)]), None
    ).config


def dump(config: Config, comments: bool = True, path: Path | None = None) -> str:
    """The configuration as commented YAML: important keys first, each below its description. The commands in the header
    name the file if they would not find `path` themselves."""
    return yaml_text.render(config, comments, None if path is None or path.name in NAMES else str(path))


def dump_chosen(config: Config, chosen: Collection[str]) -> str:
    """The configuration as YAML, for a run that somebody else starts: with the chosen settings and those that differ
    from their default. Any other would count as chosen there, and contradict what the script sets."""
    return yaml_text.render(config, comments=False, chosen=chosen)


def write(config: Config, path: Path | str, comments: bool = True) -> None:
    """Writes the configuration to a file atomically. Raises ConfigError where that is not possible."""
    write_text(dump(config, comments), Path(path))


def why_no_file(path: Path) -> str | None:
    """Why no file can have this name: something else has it, which a new file would replace, or its folder is missing;
    None if one can."""
    if os.path.isdir(path):
        return f"{path}: is a folder; name a file in it."
    if os.path.exists(path) and not os.path.isfile(path):
        return f"{path}: is a device or a pipe; name a file."
    if not os.path.isdir(path.parent):
        return f"{path}: there is no folder {path.parent}; create it, or {ELSEWHERE}."
    return None


def write_text(text: str, path: Path, advice: str = ELSEWHERE) -> None:
    """Writes a text to a file atomically; the old content stays until then. A symlink and the file's mode are kept.
    Raises ConfigError with the advice where that is not possible."""
    if problem := why_no_file(path):
        raise ConfigError(problem)
    path = Path(os.path.realpath(path))
    with _writing(path, advice):
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            # A comment may name a path that is not UTF-8; values have such characters escaped already.
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def replace_text(text: str, path: Path) -> None:
    """`write_text`; an existing file is kept as .bak, unless it has this text already. Raises ConfigError."""
    kept = Path(f"{path}.bak")
    with _writing(kept):
        if path.is_file():
            if path.read_bytes() == text.encode(errors="backslashreplace"):
                return
            shutil.copy2(path, kept)
    write_text(text, path)


def make_folder_of(path: Path) -> None:
    """Creates the folder of a file. Raises ConfigError."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _writing(path: Path, advice: str = ELSEWHERE) -> Iterator[None]:
    """Raises ConfigError where the file cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); {advice}.") from None


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def digest(config: Config) -> str:
    """A digest that is equal on all ranks of a run: sha256 over the canonical JSON of `shared_values`."""
    return hashlib.sha256(json.dumps(shared_values(config), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def shared_values(config: Config) -> dict[str, Any]:
    """Every setting by its name in Python, as JSON, without those that may differ between machines: the machine's
    number, its spelling of machine 0's address, its GPUs, its log folder and bind address, how it starts its
    ranks, with how many threads, and which it shows."""
    values = {".".join(path): value_at(config, path) for path in all_keys()}
    return {name: to_jsonable_python(value) for name, value in values.items() if name not in _OF_A_MACHINE}


def text_of_file(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError where it does not exist or is not text."""
    if path in _texts_of_pipes:
        return _texts_of_pipes[path]
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name the YAML file in it.")
    try:
        with path.open("rb") as file:
            data = file.read(document.MAX_BYTES + 1)
    except OSError as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        said_by = f" (named by ${env.CONFIG})" if path == env.config_path() else ""
        raise ConfigError(f"{path}: {what}{said_by}; {_what_to_do(path, error)}") from None
    text = document.decode(data, str(path))
    if not path.is_file():
        _texts_of_pipes[path] = text
    return text


_texts_of_pipes: dict[Path, str] = {}
"""What was read from each, as of `--config <(...)`: a second time it gives nothing."""


def _what_to_do(path: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError):
        return "check its permissions."
    if not os.path.isdir(path.parent):
        return f"there is no folder {path.parent} either; check the path."
    return f"write one with: shardkit config --defaults -o {shlex.quote(str(path))}"


def _up_to_root(start: Path) -> list[Path]:
    """The folder and its parents up to the project root; only the folder itself outside of a project."""
    above = [start, *start.parents]
    for marks in ((".git", ".hg"), ("pyproject.toml",)):
        for depth, folder in enumerate(above):
            if any(os.path.exists(folder / mark) for mark in marks):
                return above[: depth + 1]
    return [start]


def _is_accelerates(path: Path) -> bool:
    """Whether a file is an Accelerate configuration, and not another file of that name."""
    if not os.path.isfile(path):
        return False
    try:
        with path.open("rb") as file:
            text = file.read(document.MAX_BYTES)
    except OSError:
        return False
    return re.search(rb'^[ \t]*"?(compute_environment|distributed_type)"?[ \t]*:', text, re.MULTILINE) is not None


def _file_layer(path: Path) -> Layer:
    return file_layer(text_of_file(path), str(path))


def _without_address(layer: Layer) -> Layer:
    """Without `main_process_ip: null`, so that the scheduler or a flag can set the address."""
    layer.entries = {
        name: entry for name, entry in layer.entries.items() if name != ("main_process_ip",) or entry.value is not None
    }
    return layer


def _loaded(layer: Layer, path: Path | None) -> LoadedConfig:
    config, origins = validation.build(layer)
    raise_problems(layer.problems)
    return LoadedConfig(config, origins, _ordered(layer.notes), path)


def raise_problems(problems: list[str]) -> None:
    """Raises ConfigError with the problems in line order. The names known in a block are listed once."""
    if not problems:
        return
    lines, listed = _ordered(problems), set[str]()
    for number, line in enumerate(lines):
        said, _, names = line.partition(KNOWN)
        if names in listed:
            lines[number] = f"{said}{KNOWN}as above"
        listed |= {names} - {""}
    raise ConfigError(lines)


def _ordered(lines: list[str]) -> list[str]:
    def position(line: str) -> tuple[int, ...]:
        return tuple(number_in(part) or 0 for part in line.split(":")[1:3])

    return sorted(dict.fromkeys(lines), key=position)
