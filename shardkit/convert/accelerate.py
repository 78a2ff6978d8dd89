"""Accelerate's files (FSDP version 1 or 2, DDP, CPU): what each key means in shardkit, and what Accelerate does with
it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from shardkit.config import document, validation
from shardkit.config.keys import Path, all_keys, names_in, value_at
from shardkit.config.layers import Layer, SettingEntry, file_layer
from shardkit.config.schema import Config, read_count, read_strategy
from shardkit.config.yaml_text import value_text
from shardkit.convert.report import Conversion, Line

# Keys that its launcher does not pass to FSDP version 2 (accelerate 1.15, utils/dataclasses.py, the FSDP plugin).
IGNORED_IN_VERSION_2 = {
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
    "fsdp_limit_all_gathers",
}


def from_accelerate(text: str, name: str) -> Conversion:
    """The conversion of an Accelerate file, key by key. Raises ConfigError where it is not YAML."""
    root = document.compose(text, name)
    layer = file_layer(text, name)
    written = dict(layer.entries)
    config, _ = validation.build(layer)
    read = _Read(name, layer, written, config, _what_accelerate_does(document.raw(root)))
    lines = [_line(key, node, read) for key, node in _leaves(root, "")]
    return Conversion(name, config, [*lines, *_other_problems(layer, lines)])


@dataclass(frozen=True)
class _Read:
    """What was read of a file: `written` before settings were derived from others; `remarks` of Accelerate's own, by
    key."""

    name: str
    layer: Layer
    written: Mapping[Path, SettingEntry]
    config: Config
    remarks: Mapping[str, str]


def _leaves(block: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, yaml.Node]]:
    """Every key of the file with its node; shardkit's blocks are entered, blocks of other tools count as one key."""
    for key, key_node, node in document.pairs(block):
        path = names_in(()).get(key) if not prefix else None
        if isinstance(node, yaml.MappingNode) and path is not None and path[0] in {"fsdp", "shardkit"}:
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", key_node


def _line(key: str, node: yaml.Node, read: _Read) -> Line:
    remark = read.remarks.get(key, "")
    problem = _said_about(key, node, read.layer.problems, read.name)
    if problem:
        text = _joined(problem, remark or _unknown_remark(key, problem))
        return Line(key, "refused", text, str(document.place_of(node, read.name)))
    found = {path: entry for path, entry in read.written.items() if _stands_at(entry, node)}
    note = _said_about(key, node, read.layer.notes, read.name)
    if not found:
        return Line(key, "left out", note or _joined("sets nothing here", remark))
    becomes = "; ".join(_as_written(path, read.config) for path in found)
    same = all(_is_same(path, entry, key, read.config) for path, entry in found.items())
    return Line(key, "kept" if same else "changed", note or _joined(becomes, remark))


def _stands_at(entry: SettingEntry, node: yaml.Node) -> bool:
    return entry.key_node is not None and entry.key_node.start_mark.index == node.start_mark.index


def _is_same(path: Path, entry: SettingEntry, key: str, config: Config) -> bool:
    if path == ("fsdp", "reshard_after_forward") or key != all_keys()[path].yaml_name:
        return False
    now = value_at(config, path)
    return entry.value is None or _plain(entry.value) == _plain(getattr(now, "value", now))


def _plain(value: Any) -> str:
    words = value if isinstance(value, list) else [value]
    text = ",".join(str(word) for word in words).strip().lower()
    return {"no": "false", "yes": "true"}.get(text, text)


def _as_written(path: Path, config: Config) -> str:
    if path == ("fsdp", "reshard_after_forward"):
        path = ("fsdp", "sharding_strategy")
    return f"{all_keys()[path].yaml_path[-1]}: {value_text(path, value_at(config, path))}"


def _said_about(key: str, node: yaml.Node, lines: list[str], name: str) -> str:
    """The loader's messages about a key: they begin with the place of the key or its value, then the key."""
    line = node.start_mark.line + 1
    found = [text for text in lines if text.startswith(f"{name}:{line}:") and f": {key}: " in text]
    return "; ".join(text.split(f": {key}: ", 1)[1].rstrip(".") for text in found)


def _other_problems(layer: Layer, lines: list[Line]) -> list[Line]:
    """Problems that belong to no single key of the file, such as a duplicate key."""
    reported = " ".join(line.text for line in lines)
    rest = [problem for problem in layer.problems if problem.split(": ", 2)[-1].rstrip(".") not in reported]
    return [Line("", "refused", problem) for problem in dict.fromkeys(rest)]


def _unknown_remark(key: str, problem: str) -> str:
    if "." in key and problem.startswith("unknown key"):
        return "Accelerate ignores it silently"
    return ""


def _joined(*texts: str) -> str:
    return "; ".join(text.rstrip(".") for text in texts if text)


def _what_accelerate_does(data: Any) -> dict[str, str]:
    """Keys that Accelerate itself does not follow, and what it does instead."""
    remarks: dict[str, str] = {}
    fsdp = data.get("fsdp_config")
    if isinstance(fsdp, Mapping):
        remarks |= {f"fsdp_config.{key}": text for key, text in _remarks_on_fsdp(fsdp)}
    mpirun = data.get("mpirun_config")
    hosts = mpirun.get("mpirun_hostfile") if isinstance(mpirun, Mapping) else ""
    count = read_count(data.get("num_processes"))
    if str(data.get("distributed_type")).upper() == "MULTI_CPU" and not hosts and isinstance(count, int) and count > 1:
        remarks["num_processes"] = f"Accelerate starts one process, not {count}, unless mpirun is configured"
    return remarks


def _remarks_on_fsdp(fsdp: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = {key.yaml_path[-1] for path, key in all_keys().items() if path[0] == "fsdp"}
    version = str(fsdp.get("fsdp_version") or fsdp.get("version") or 1)
    for key, value in fsdp.items():
        name = key if key.startswith("fsdp") else f"fsdp_{key}"  # as its launcher does
        if key in names_in(("fsdp",)) and name not in known:
            yield key, "Accelerate ignores this spelling silently"
        elif version == "2" and name in IGNORED_IN_VERSION_2:
            yield key, "Accelerate does not use it with fsdp_version 2"
        elif version == "1" and name == "fsdp_reshard_after_forward":
            names_a_strategy = isinstance(read_strategy(value), str) and str(value).lower() not in {"true", "false"}
            ran = fsdp.get("fsdp_sharding_strategy") or fsdp.get("sharding_strategy") or "FULL_SHARD"
            yield key, f"Accelerate ran {ran}" if names_a_strategy else "Accelerate does not use it with fsdp_version 1"
        elif name == "fsdp_transformer_layer_cls_to_wrap" and isinstance(value, list):
            yield key, "Accelerate reads the whole list as one name"
