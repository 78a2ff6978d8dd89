"""Edits a user's file: only lines whose values change, and all comments are kept."""

import re
from typing import Any

import yaml

from shardkit.config import document, validation
from shardkit.config.keys import Path, all_keys, sections, value_at
from shardkit.config.layers import SettingEntry, file_layer
from shardkit.config.schema import Config
from shardkit.config.yaml_text import head_lines, key_lines, render, value_text
from shardkit.errors import ConfigError

_NAME = "file"
_STRATEGY, _RESHARD = ("fsdp", "sharding_strategy"), ("fsdp", "reshard_after_forward")
_ANCHOR, _ALIAS = re.compile(r"&\S+\s+"), re.compile(r"\s*\*[^\s,\[\]{}]+")
_ROUNDS = 3
"""An anchor's value changes for all that name it: the next round gives each of them its own."""


def edited(text: str, config: Config) -> str:
    """The text with as few changed lines as possible, so that it gives the configuration; rewritten, without its
    comments, where `edited_by_line` cannot change it."""
    changed = edited_by_line(text, config)
    return render(config, comments=True) if changed is None else changed


def edited_by_line(text: str, config: Config) -> str | None:
    """The text with changed lines, and all comments; None where that does not give the configuration, as with blocks
    merged by `<<` into several. Raises ConfigError where the text cannot be read."""
    validation.build(file_layer(text, _NAME))
    try:
        for _ in range(_ROUNDS):
            if _says(text, config):
                return text
            former, _ = validation.build(file_layer(text, _NAME))
            for path in all_keys():
                if value_at(former, path) != value_at(config, path):
                    text = _with_value(text, path, value_at(config, path))
    except ConfigError:
        return None
    return text if _says(text, config) else None


def _says(text: str, config: Config) -> bool:
    layer = file_layer(text, _NAME)
    return validation.build(layer)[0] == config and not layer.problems


def _with_value(text: str, path: Path, value: Any) -> str:
    """The text with one setting changed, in its line if it has one."""
    layer = file_layer(text, _NAME)
    reshard = layer.entries.get(_RESHARD)
    validation.settle(layer)
    entry = layer.entries.get(path)
    if entry is None or entry.key_node is None or entry.node is None:
        return _with_key(text, path, value)
    if path == _STRATEGY and reshard is not None and entry.direct and reshard.value is not None:
        # The two must agree; the later one first, so that the places of the other stay.
        both = [(entry, value_text(path, value)), (reshard, value_text(_RESHARD, value.reshards_after_forward))]
        for one, written in sorted(both, key=lambda pair: _begin(pair[0]), reverse=True):
            text = _with_value_of(text, one, written)
        return text
    if entry.direct:
        return _with_value_of(text, entry, value_text(path, value))
    key = all_keys()[path].yaml_path[-1]
    return text[: _begin(entry)] + f"{key}: {value_text(path, value)}" + text[_end(entry.node) :]


def _begin(entry: SettingEntry) -> int:
    assert entry.key_node is not None
    return entry.key_node.start_mark.index


def _with_value_of(text: str, entry: SettingEntry, written: str) -> str:
    """Replaces a value in place; a value below its key moves to the key's line. An anchor stays."""
    assert entry.key_node is not None
    assert entry.node is not None
    colon = text.index(":", entry.key_node.end_mark.index) + 1
    start, end = entry.node.start_mark.index, _end(entry.node)
    if start < _begin(entry):  # the value of an anchor that is named here
        alias = _ALIAS.match(text, colon)
        return text if alias is None else text[:colon] + f" {written}" + text[alias.end() :]
    if end <= start or "\n" in text[colon:start]:
        rest = text[colon:start].partition("\n")[0].rstrip() if end > start else ""  # a comment
        return text[:colon] + f" {written}{rest}" + text[max(colon, end if end > start else colon) :]
    anchor = _ANCHOR.match(text, start)
    return text[: anchor.end() if anchor else start] + written + text[end:]


def _with_key(text: str, path: Path, value: Any) -> str:
    """Adds a setting at the end of its block, with the head lines of missing blocks."""
    root = document.compose(text, _NAME)
    block, node = _deepest_block(root, path)
    if node.flow_style and node.value:
        return _with_key_in_braces(text, path, value, block, node)
    lines = [line for length in range(len(block) + 1, len(path)) for line in head_lines(path[:length], True)]
    lines += key_lines(path, value, comments=True)
    if head := _empty_block(node, path[: len(block) + 1]):
        colon = text.index(":", head[0].end_mark.index) + 1
        text = text[:colon] + text[max(colon, head[1].end_mark.index) :]
        return _with_lines(text, _after_line(text, colon), lines[2:], block, node)
    if block == () and len(path) == 1:
        position = _after_plain_keys(root, text)
    else:
        position = _after_line(text, _end(node))
    return _with_lines(text, position, lines, block, node)


def _with_lines(text: str, position: int, lines: list[str], block: Path, node: yaml.MappingNode) -> str:
    """Adds the lines of settings, indented as the block that they belong to."""
    new_line = "\r\n" if "\r\n" in text else "\n"
    before, indent = text[:position], " " * node.start_mark.column
    if before and not before.endswith("\n"):
        before += new_line
    return before + "".join(indent + line[2 * len(block) :] + new_line for line in lines) + text[position:]


def _empty_block(node: yaml.MappingNode, path: Path) -> tuple[yaml.Node, yaml.Node] | None:
    """Key and value of an inner block that is named and has no keys, as `fsdp_config: {}`; None where it is missing."""
    name = sections()[path][-1] if path in sections() else None
    return next(((key, value) for written, key, value in document.pairs(node) if written == name), None)


def _with_key_in_braces(text: str, path: Path, value: Any, block: Path, node: yaml.MappingNode) -> str:
    """Adds a setting before the brace that ends its block."""
    names = all_keys()[path].yaml_path[len(block) :]
    written = "".join(f"{name}: {{" for name in names[:-1]) + f"{names[-1]}: {value_text(path, value)}"
    position = _end(node.value[-1][1])
    return text[:position] + f", {written}" + "}" * (len(names) - 1) + text[position:]


def _deepest_block(root: yaml.MappingNode, path: Path) -> tuple[Path, yaml.MappingNode]:
    """The innermost of the setting's blocks that the file has keys in, as (path, node)."""
    node: yaml.MappingNode = root
    block: Path = ()
    for length in range(1, len(path)):
        name = sections()[path[:length]][-1]
        inner = next((value for key, _, value in document.pairs(node) if key == name), None)
        if not isinstance(inner, yaml.MappingNode) or not inner.value:
            break
        node, block = inner, path[:length]
    return block, node


def _after_plain_keys(root: yaml.MappingNode, text: str) -> int:
    """The position of a new top-level key: below the last one that is not a block."""
    plain = [value for _, _, value in document.pairs(root) if not isinstance(value, yaml.MappingNode)]
    if not plain:
        return root.start_mark.index - root.start_mark.column
    return _after_line(text, max(map(_end, plain)))


def _after_line(text: str, index: int) -> int:
    match = re.compile(r"[^\n]*(\n|$)").match(text, index)
    return match.end() if match else len(text)


def _end(node: yaml.Node) -> int:
    """The position of a value's last character; a block's end mark points to the next token."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.index
