"""Entries -> Config: resolves contradictions, checks types, and reports every problem at its place."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardkit.config import checks
from shardkit.config.accelerate_keys import REFUSED_VALUES
from shardkit.config.document import shortened
from shardkit.config.keys import Key, Path, all_keys, names_in, nearest, sections
from shardkit.config.layers import DEFAULT, STRENGTH, Layer, Origin, SettingEntry, is_absent, with_value
from shardkit.config.schema import Config, DistributedType, ShardingStrategy, read_bool, read_strategy
from shardkit.errors import ConfigError

_RESHARD = ("fsdp", "reshard_after_forward")
_STRATEGY = ("fsdp", "sharding_strategy")
_VERSION = ("fsdp", "version")
_REPLICATE = ("shardkit", "mesh", "replicate_size")


def build(layer: Layer) -> tuple[Config, dict[str, Origin]]:
    """The layer's configuration, and the origin of each value. Adds to the layer's notes and problems. An invalid value
    counts as unset, so that other problems are found too."""
    settle(layer)
    entries = {path: entry for path, entry in layer.entries.items() if not is_absent(path, entry)}
    config, broken = _validated(entries, layer)
    if ("num_processes",) not in entries:
        broken.add("num_processes")  # set from the hardware later; checks must not use the schema's default
    layer.problems += [
        _located(layer, finding) for finding in checks.problems(config) if not broken & set(finding.keys)
    ]
    asked = {".".join(path) for path, entry in entries.items() if _is_asked_for(path, entry)}
    notes = checks.notes(config, asked)
    layer.notes += [_located(layer, finding) for finding in notes if not broken & set(finding.keys)]
    origins = {key.name: entries[path].origin if path in entries else DEFAULT for path, key in all_keys().items()}
    return config, origins


def _is_asked_for(path: Path, entry: SettingEntry) -> bool:
    """Whether somebody wants this value, even if it is the default. Files also have defaults that a wizard wrote, but
    the strategy only where it acts."""
    return entry.direct and (entry.origin.kind == "flag" or path == _STRATEGY)


def built_in_python(config: Config) -> tuple[Config, list[str]]:
    """A configuration built in Python, normalized and checked like a file, and its notes. Raises ConfigError with all
    problems. `num_processes` must be the world size."""
    config = settled(config)

    def lines(findings: list[checks.Finding]) -> list[str]:
        return [f"Accelerator(config=...): {finding.keys[0]}: {finding.text}" for finding in findings]

    problems = lines(checks.problems(config))
    if problems:
        raise ConfigError(problems)
    asked = {".".join(_STRATEGY)} if "sharding_strategy" in config.fsdp.model_fields_set else set()
    return config, lines(checks.notes(config, asked))


def settled(config: Config) -> Config:
    """A configuration built in Python, with `reshard_after_forward` merged into `sharding_strategy`, as for a file.
    Raises ConfigError where the two contradict each other."""
    reshards, strategy = config.fsdp.reshard_after_forward, config.fsdp.sharding_strategy
    if reshards is None:
        return config
    meant = _resharding(strategy, reshards)
    if meant is not strategy and "sharding_strategy" in config.fsdp.model_fields_set:
        what = f"means {meant.value}, but sharding_strategy says {strategy.value}"
        raise ConfigError(f"fsdp.reshard_after_forward: {what} (got {reshards}); keep one of them.")
    return config.changed(fsdp={"sharding_strategy": meant, "reshard_after_forward": None})


def settle(layer: Layer) -> None:
    """Normalizes entries that can be written in several ways: `sharding_strategy` then includes
    `reshard_after_forward`, and a hybrid mesh or `xla: true` sets the strategy and type that it needs."""
    reshard = layer.entries.pop(_RESHARD, None)
    if reshard is not None and reshard.value is not None:
        _settle_reshard(layer, reshard)
    _settle_mesh(layer)
    xla, kind = layer.entries.get(("xla",)), layer.entries.get(("distributed_type",))
    if xla and read_bool(xla.value) is True and (kind is None or str(kind.value).upper() == "FSDP"):
        layer.entries[("distributed_type",)] = with_value(xla, DistributedType.XLA)


def _settle_reshard(layer: Layer, reshard: SettingEntry) -> None:
    strategy = layer.entries.get(_STRATEGY)
    base = read_strategy(strategy.value) if strategy else ShardingStrategy.FULL_SHARD
    meant = _meaning(reshard.value, base)
    if meant is None:
        got = shortened(reshard.value)
        layer.problems.append(f"{reshard.place}: is not yes or no (got {got!r}); write true or false.")
    elif strategy is None or _stronger(reshard, strategy):
        layer.entries[_STRATEGY] = with_value(reshard, meant)
        if not isinstance(read_bool(reshard.value), bool):
            text = f"is read as fsdp_sharding_strategy: {meant.value}; Accelerate ignores it and runs FULL_SHARD."
            layer.notes.append(f"{reshard.place}: {text}")
    elif meant != base and not _stronger(strategy, reshard):
        _settle_contradiction(layer, reshard, strategy, meant)


def _settle_contradiction(layer: Layer, reshard: SettingEntry, strategy: SettingEntry, meant: ShardingStrategy) -> None:
    version = layer.entries.get(_VERSION)
    if version is not None and str(version.value).strip() == "1":
        text = f"is not used with fsdp_version 1; {strategy.name} says {shortened(strategy.value)}."
        layer.notes.append(f"{reshard.place}: {text}")
        return
    text = f"means {meant.value}, but {strategy.name} in {strategy.origin} says {shortened(strategy.value)}"
    layer.problems.append(f"{reshard.place}: {text}; keep one of them.")


def _meaning(value: Any, base: Any) -> ShardingStrategy | None:
    """The strategy for a value of reshard_after_forward; older files have a strategy's name there."""
    if isinstance(read_bool(value), bool):
        return _resharding(base, bool(read_bool(value)))
    name = read_strategy(value)
    return ShardingStrategy(name) if name in list(ShardingStrategy) else None


def _resharding(base: Any, reshards: bool) -> ShardingStrategy:
    if base == ShardingStrategy.NO_SHARD:
        return ShardingStrategy.NO_SHARD
    if base in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2):
        return ShardingStrategy.HYBRID_SHARD if reshards else ShardingStrategy.HYBRID_SHARD_ZERO2
    return ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP


def _settle_mesh(layer: Layer) -> None:
    """Accelerate's version 2 files express a hybrid strategy only by mesh sizes."""
    mesh, strategy = layer.entries.get(_REPLICATE), layer.entries.get(_STRATEGY)
    if mesh is None or mesh.direct or (strategy is not None and strategy.direct):
        return
    base = read_strategy(strategy.value) if strategy else ShardingStrategy.FULL_SHARD
    if ("shardkit", "mesh", "shard_size") not in layer.entries:
        hybrid = ShardingStrategy.NO_SHARD
        del layer.entries[_REPLICATE]
    else:
        keeps = base in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD_ZERO2)
        hybrid = ShardingStrategy.HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
    layer.entries[_STRATEGY] = with_value(mesh, hybrid)
    layer.notes.append(f"{mesh.place}: these sizes make fsdp_sharding_strategy {hybrid.value}.")


def _stronger(entry: SettingEntry, other: SettingEntry) -> bool:
    return STRENGTH.index(entry.origin.kind) > STRENGTH.index(other.origin.kind)


def _validated(entries: Mapping[Path, SettingEntry], layer: Layer) -> tuple[Config, set[str]]:
    try:
        return Config.model_validate(_nested(entries)), set()
    except ValidationError as error:
        wrong = {_path_of(detail["loc"]): detail for detail in reversed(error.errors(include_url=False))}
    for path in [path for path in entries if path in wrong]:
        entry = entries[path]
        layer.problems.append(f"{entry.place}: {_words(wrong[path], all_keys()[path], entry.value)}")
    config = Config.model_validate(_nested({path: entry for path, entry in entries.items() if path not in wrong}))
    return config, {".".join(path) for path in wrong}


def _nested(entries: Mapping[Path, SettingEntry]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for path, entry in entries.items():
        block = data
        for part in path[:-1]:
            block = block.setdefault(part, {})
        block[path[-1]] = entry.value
    return data


def _path_of(location: tuple[Any, ...]) -> Path:
    """The setting of a pydantic error; later parts of the location are positions in a list or union."""
    path: Path = ()
    for part in location:
        path = names_in(path)[part]
        if path not in sections():
            break
    return path


def _located(layer: Layer, finding: checks.Finding) -> str:
    """A finding at the first of its keys that was set."""
    paths = [tuple(name.split(".")) for name in finding.keys]
    origin = next((layer.entries[path].origin for path in paths if path in layer.entries), None)
    name = all_keys()[paths[0]].yaml_name
    return f"{origin.of(name) if origin else name}: {finding.text}"


def choices_of(field: FieldInfo) -> list[str]:
    """The allowed words of a setting; empty where any value is allowed."""
    kinds = [field.annotation, *get_args(field.annotation)]
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return [member.value for member in kind]
        if get_origin(kind) is Literal:
            return [str(choice) for choice in get_args(kind)]
    return []


def _words(detail: Any, key: Key, value: Any) -> str:
    """The text of what is wrong with a value, and what to do."""
    got = f"(got {shortened(value)!r})"
    limit = detail.get("ctx", {})
    refused = REFUSED_VALUES.get(key.path, {})
    special = next((text for name, text in refused.items() if name.upper() == str(value).strip().upper()), None)
    if special:
        return f"is not supported {got}; {special}."
    match detail["type"]:
        case "enum" | "literal_error":
            return f"is not one of the choices {got}; {_choices_in_words(key, value)}"
        case "bool_parsing" | "bool_type":
            return f"is not yes or no {got}; write true or false."
        case "greater_than_equal":
            return f"is too small {got}; write {_number(limit['ge'])} or more."
        case "less_than_equal":
            return f"is too large {got}; write {_number(limit['le'])} or less."
        case "less_than":
            return f"is too large {got}; write less than {_number(limit['lt'])}."
        case "greater_than":
            return f"is too small {got}; write more than {_number(limit['gt'])}."
    return f"is not {_kind_in_words(detail['type'])} {got}; {_example(key)}"


def _number(limit: float) -> str:
    """The number as it is written in a file: 1000000, not 1e+06."""
    return str(int(limit)) if limit == int(limit) else f"{limit:g}"


def _choices_in_words(key: Key, value: Any) -> str:
    hint = nearest(value, choices_of(key.field))
    numbers = key.path == _STRATEGY and hint.startswith("write")
    return hint.rstrip(".") + ", or its number, 1 to 5." if numbers else hint


def _kind_in_words(kind: str) -> str:
    words = {"int": "a whole number", "float": "a number", "finite": "a finite number", "string": "a text"}
    words |= {"dict": "a block of keys", "list": "a list of names", "literal": "one of the choices"}
    return words.get(kind.partition("_")[0], "valid")


def _example(key: Key) -> str:
    default = key.default
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        return f"write one such as {default:g}." if default < 1e7 else "write one such as 1e8 or 100M."
    if isinstance(default, list):
        return "write names with commas."
    if isinstance(default, dict):
        return "indent its keys below it."
    return "write a number such as 1." if "int" in str(key.field.annotation) else "write a plain word."
