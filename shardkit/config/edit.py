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


def edited(text: str, config: Config) -> str:
    """The text with as few changed lines as possible, so that it gives the configuration. A text that cannot be changed
    line by line (aliases, flow blocks) is rewritten without its comments. Raises ConfigError where it cannot be
    read."""
    former, _ = validation.build(file_layer(text, _NAME))
    changed = text
    try:
        for path in all_keys():
            if value_at(former, path) != value_at(config, path):
                changed = _with_value(changed, path, value_at(config, path))
        if _says(changed, config):
            return changed
    except ConfigError:
        pass
    return render(config, comments=True)


def _says(text: str, config: Config) -> bool:
    layer = file_layer(text, _NAME)
    return validation.build(layer)[0] == config and not layer.problems


def _with_value(text: str, path: Path, value: Any) -> str:
    """The text with one setting changed, in its line if it has one."""
    layer = file_layer(text, _NAME)
    validation.settle(layer)
    entry = layer.entries.get(path)
    if entry is None or entry.key_node is None or entry.node is None:
        return _with_key(text, path, value)
    if entry.direct:
        return _with_value_of(text, entry, value_text(path, value))
    start = entry.key_node.start_mark.index
    key = all_keys()[path].yaml_path[-1]
    return text[:start] + f"{key}: {value_text(path, value)}" + text[_end(entry.node) :]


def _with_value_of(text: str, entry: SettingEntry, written: str) -> str:
    """Replaces a value in place; a value below its key moves to the key's line."""
    assert entry.key_node is not None
    assert entry.node is not None
    colon = text.index(":", entry.key_node.end_mark.index) + 1
    start, end = entry.node.start_mark.index, _end(entry.node)
    if end <= start or "\n" in text[colon:start]:
        start, end, written = colon, max(colon, end if end > start else colon), f" {written}"
    return text[:start] + written + text[end:]


def _with_key(text: str, path: Path, value: Any) -> str:
    """Adds a setting at the end of its block, with the head lines of missing blocks."""
    root = document.compose(text, _NAME)
    block, node = _deepest_block(root, path)
    lines = [line for length in range(len(block) + 1, len(path)) for line in head_lines(path[:length], True)]
    lines += key_lines(path, value, comments=True)
    if block == () and len(path) == 1:
        position = _after_plain_keys(root, text)
    else:
        position = _after_line(text, _end(node))
    indent = _shift(node, block)
    new_line = "\r\n" if "\r\n" in text else "\n"
    before = text[:position]
    if before and not before.endswith("\n"):
        before += new_line
    return before + "".join(indent + line + new_line for line in lines) + text[position:]


def _deepest_block(root: yaml.MappingNode, path: Path) -> tuple[Path, yaml.MappingNode]:
    """The innermost of the setting's blocks that the file has, as (path, node)."""
    node: yaml.MappingNode = root
    block: Path = ()
    for length in range(1, len(path)):
        name = sections()[path[:length]][-1]
        inner = next((value for key, _, value in document.pairs(node) if key == name), None)
        if not isinstance(inner, yaml.MappingNode):
            break
        node, block = inner, path[:length]
    if node.flow_style:
        raise ConfigError("a flow block in braces cannot be edited by line")
    return block, node


def _shift(node: yaml.MappingNode, block: Path) -> str:
    """Spaces to add where the file indents by more than two."""
    return " " * max(0, node.start_mark.column - 2 * len(block))


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
