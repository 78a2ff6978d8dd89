"""Layers of settings from a file, the environment and flags, each with its origin; combined into one Config.

A layer maps a setting's path in Python to the written value. Later layers win, setting by setting.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import yaml

from shardkit import env
from shardkit.config import accelerate_keys, document
from shardkit.config.keys import (
    Path,
    all_keys,
    flat_name,
    names_in,
    resolve_name,
    sections,
    suggestion,
    suggestion_for_dotted,
)
from shardkit.errors import ConfigError

Kind = Literal["default", "hardware", "file", "environment", "flag", "code"]
STRENGTH = get_args(Kind)


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: the kind of source, and the place (`shardkit.yaml:24:3`, `--set`, ...)."""

    kind: Kind
    where: str

    def __str__(self) -> str:
        return self.where

    def of(self, name: str) -> str:
        """The place of a setting: `shardkit.yaml:24:3: num_machines`; a flag names it already: `--set num_machines`."""
        return self.where if self.kind == "flag" else f"{self.where}: {name}"


DEFAULT = Origin("default", "default")


class FlagValue(str):
    """The value of a setting that has a flag of its own. `flag`: how errors name it, such as `--num-processes`."""

    flag: str

    def __new__(cls, value: str, flag: str) -> "FlagValue":
        given = super().__new__(cls, value)
        given.flag = flag
        return given


@dataclass(frozen=True)
class SettingEntry:
    """One value as written. `direct` is False if it was derived from another key or block."""

    value: Any
    origin: Origin
    name: str
    key_node: yaml.Node | None = None
    node: yaml.Node | None = None
    direct: bool = True

    @property
    def place(self) -> str:
        """Where it is written, and its name."""
        return self.origin.of(self.name)


@dataclass
class Layer:
    """One source's settings, problems and notes."""

    entries: dict[Path, SettingEntry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def file_layer(text: str, name: str) -> Layer:
    """The settings of a YAML text. Raises ConfigError where it is not YAML at all."""
    root = document.compose(text, name)
    layer = Layer(problems=document.unwelcome(root, name))
    _read_block(layer, root, (), name)
    return layer


def environment_layer() -> Layer:
    """The settings in $SHARDKIT_SET_*."""
    settings = env.settings()
    prefix = "$SHARDKIT_SET_"
    where = {name: prefix + name.upper().replace(".", "__") for name in settings}
    return _settings_layer(settings, "environment", where)


def clashes(settings: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """The problems of settings that two flags give different values: no order says which is meant. One flag may be
    repeated."""
    both = [name for name in others if name in settings]
    different = [name for name in both if settings[name].strip().lower() != others[name].strip().lower()]
    flags = {name: (_flag_of(name, others[name]), _flag_of(name, settings[name])) for name in different}
    return [
        f"{mine}: sets the same as {its} (got {others[name]} and {settings[name]}); keep one of them."
        for name, (mine, its) in flags.items()
        if mine != its
    ]


def _flag_of(name: str, value: str) -> str:
    return value.flag if isinstance(value, FlagValue) else f"--set {name}"


def flag_layer(settings: Mapping[str, str]) -> Layer:
    """The settings given on the command line or in Python. A FlagValue is named by its flag, others by --set."""
    values = {name: str(value) if isinstance(value, FlagValue) else value for name, value in settings.items()}
    return _settings_layer(values, "flag", {name: _flag_of(name, value) for name, value in settings.items()})


def is_absent(path: Path, entry: SettingEntry) -> bool:
    """null means: not given, except where None is a value of the setting."""
    optional = type(None) in get_args(all_keys()[path].field.annotation) or path == ("fsdp", "backward_prefetch")
    return entry.value is None and not optional


def combine(layers: Iterable[Layer]) -> Layer:
    """All layers as one; later ones win with what they give."""
    combined = Layer()
    for layer in layers:
        combined.entries |= {path: entry for path, entry in layer.entries.items() if not is_absent(path, entry)}
        combined.problems += layer.problems
        combined.notes += layer.notes
    return combined


def _settings_layer(settings: Mapping[str, str], kind: Kind, where: Mapping[str, str]) -> Layer:
    layer = Layer()
    for name, value in settings.items():
        path = resolve_name(name)
        if path is None and (foreign := _foreign(name)):
            _take_foreign_setting(layer, *foreign, value, Origin(kind, where[name]))
        elif path is None or path in sections():
            layer.problems.append(f"{where[name]}: {unknown_setting(name, path)}")
        elif path in layer.entries and layer.entries[path].name != name:
            other = layer.entries[path].origin
            layer.problems.append(f"{where[name]}: sets the same as {other}; keep one of them.")
        else:
            try:
                layer.entries[path] = SettingEntry(setting_value(path, value), Origin(kind, where[name]), name)
            except ConfigError as error:
                layer.problems += [f"{where[name]}: {problem}" for problem in error.problems]
    return layer


def _foreign(name: str) -> tuple[Path, str] | None:
    """(section, key) of a dotted name that is a key of Accelerate's files, not shardkit's; None for any other."""
    block, _, key = name.strip().rpartition(".")
    section = resolve_name(block) if block else ()
    return (section, key) if section is not None and accelerate_keys.is_foreign(section, key) else None


def _take_foreign_setting(layer: Layer, section: Path, key: str, value: Any, origin: Origin) -> None:
    """Translates a foreign key that is given as a setting, or adds a problem."""
    if isinstance(value, str):
        value = document.raw(_node_of(value))
    outcome = accelerate_keys.translate(section, key, value)
    _put_translated(layer, outcome, str(origin), SettingEntry(None, origin, key, direct=False))


NOTHING = {"", "null", "~"}


def setting_value(path: Path, text: Any) -> Any:
    """The value of a setting written as one word. null is None; lists and blocks may be written as in YAML, [A, B] and
    {a: 1}, and any text in double quotes."""
    if not isinstance(text, str):
        return text
    if text.strip().lower() in NOTHING:
        return None
    holds_many = isinstance(all_keys()[path].default, (list, dict))
    if not (text.startswith('"') or (holds_many and text.lstrip().startswith(("[", "{")))):
        return text
    node = _node_of(text)
    return document.typed(node) if path == ("xla_fsdp_settings",) else document.raw(node)


def _node_of(text: str) -> yaml.Node:
    """Text as a value in YAML."""
    return document.pairs(document.compose(f"value: {text}", "value"))[0][2]


def unknown_setting(name: str, path: Path | None) -> str:
    """The error text for a dotted name that is not a setting: unknown, or (with `path`) a block."""
    if path is not None:
        return f"{name} is a block of settings; set one of them, such as {name}.{next(iter(names_in(path)))}."
    return f"unknown setting (got {name}); {suggestion_for_dotted(name)}"


@dataclass(frozen=True)
class _Written:
    """A key of a file with its value, and the block that it is in."""

    section: Path
    key: str
    key_node: yaml.Node
    node: yaml.Node
    file: str

    @property
    def name(self) -> str:
        """As it is written, with its blocks: `fsdp_config.fsdp_version`."""
        return ".".join([*sections().get(self.section, ()), self.key])

    @property
    def where(self) -> str:
        """The place of the key."""
        return str(document.place_of(self.key_node, self.file))

    def entry(self, value: Any, at: yaml.Node, direct: bool) -> SettingEntry:
        """A setting that is written here, or follows from it. `at`: the node that it comes from."""
        origin = Origin("file", str(document.place_of(at, self.file)))
        return SettingEntry(value, origin, self.name, self.key_node, self.node, direct)


def _read_block(layer: Layer, block: yaml.MappingNode, section: Path, file: str) -> None:
    for key, key_node, node in document.pairs(block):
        _read_key(layer, _Written(section, key, key_node, node, file))
    if section == ():
        layer.notes += _note_on_flat_keys(layer)


def _read_key(layer: Layer, written: _Written) -> None:
    section, key = written.section, written.key
    path = names_in(section).get(key) or _outside(section, key)
    if accelerate_keys.is_foreign(section, key):
        outcome = accelerate_keys.translate(section, key, document.raw(written.node))
        entry = written.entry(None, written.key_node, direct=False)
        _put_translated(layer, outcome, f"{written.where}: {written.name}", entry)
    elif path is None:
        hint = accelerate_keys.hint(section, key, written.file) or suggestion(key, section)
        layer.problems.append(f"{written.where}: {document.shortened(written.name, 80)}: unknown key; {hint}")
    elif path in sections():
        _read_section(layer, written, path)
    else:
        value = _value_of(layer, written, path)
        _put(layer, path, written.entry(value, written.node, key in _direct_names(path)))


def _read_section(layer: Layer, written: _Written, path: Path) -> None:
    node = written.node
    if isinstance(node, yaml.MappingNode):
        _read_block(layer, node, path, written.file)
    elif document.raw(node) is not None:
        got = document.shortened(document.raw(node))
        what = f"is not a block of keys (got {got!r}); indent its keys below it."
        layer.problems.append(f"{document.place_of(node, written.file)}: {written.name}: {what}")


def _value_of(layer: Layer, written: _Written, path: Path) -> Any:
    """The value as text; of settings that are passed through as YAML types it, with a problem where it does not."""
    if path == ("xla_fsdp_settings",) and isinstance(written.node, yaml.MappingNode):
        try:
            return document.typed(written.node, f"{written.where}: {written.name}")
        except ConfigError as error:
            layer.problems += error.problems
    return document.raw(written.node)


def _outside(section: Path, key: str) -> Path | None:
    """Keys accepted outside of their block: fsdp_ keys at the top level, and XLA keys inside fsdp_config."""
    if section == ():
        return flat_name(key)
    if section == ("fsdp",) and (key == "xla" or key.startswith("xla_")):
        return names_in(()).get(key)
    return None


def _put_translated(layer: Layer, outcome: accelerate_keys.Translation, where: str, entry: SettingEntry) -> None:
    """Adds the settings of a foreign key, each as `entry` with its value, and what was found wrong or notable."""
    layer.problems += [f"{where}: {problem}" for problem in outcome.problems]
    layer.notes += [f"{where}: {note}" for note in outcome.notes]
    for path, value in outcome.settings.items():
        _put(layer, path, replace(entry, value=value))


def _put(layer: Layer, path: Path, entry: SettingEntry) -> None:
    former = layer.entries.get(path)
    if former is None or (not entry.direct and former.value == entry.value):
        layer.entries[path] = former or entry
        return
    what = f"{entry.name}: sets the same as {former.name} in {former.origin}; keep one of them."
    layer.problems.append(f"{entry.origin}: {what}")


def _note_on_flat_keys(layer: Layer) -> list[str]:
    flat = [entry for path, entry in layer.entries.items() if path[0] == "fsdp" and "." not in entry.name]
    flat = [entry for entry in flat if entry.name.startswith("fsdp_")]
    if not flat:
        return []
    return [f"{flat[0].origin}: {len(flat)} fsdp_ keys are at the top level; they are read as part of fsdp_config."]


def _direct_names(path: Path) -> tuple[str, str]:
    key = all_keys()[path]
    return key.yaml_path[-1], key.path[-1]


def with_value(entry: SettingEntry, value: Any) -> SettingEntry:
    """The entry with another value."""
    return replace(entry, value=value, direct=False)
