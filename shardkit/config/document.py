"""A YAML file as nodes with line and column. Values stay text, so `no`, `08` and `1e8` are read as written.

No objects are constructed from tags: a file contains only data.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import yaml

from shardkit.errors import ConfigError

# A configuration is about a page. These limits protect time and memory from wrong or malicious files.
MAX_BYTES = 256 * 1024
MAX_VALUES = 20_000
MAX_DEPTH = 20

_PLAIN = "tag:yaml.org,2002:"
_TAGS = {_PLAIN + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map", "timestamp", "value")}
_MERGE = _PLAIN + "merge"


@dataclass(frozen=True)
class Location:
    """A place in a file, counted from 1."""

    name: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.name}:{self.line}:{self.column}"


def decode(data: bytes, name: str) -> str:
    """The text of a file, with any line ends, with or without a byte order mark. Raises ConfigError."""
    if len(data) > MAX_BYTES:
        size = f"more than {MAX_BYTES // 1024} KiB"
        raise ConfigError(f"{name}: is too large for a configuration (got {size}); check the file name.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is not a UTF-8 text file (got byte 0x{data[error.start]:02x} at {error.start})"
        raise ConfigError(f"{name}: {what}; name a YAML file, or save it as UTF-8.") from None
    if "\0" in text:
        raise ConfigError(f"{name}: is not a text file (got NUL bytes); name a YAML file.")
    return text


def compose(text: str, name: str) -> yaml.MappingNode:
    """The file's top level. Raises ConfigError for what is not YAML, not a mapping, or not plain data."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply; a configuration has at most {MAX_DEPTH} levels.") from None
    except yaml.reader.ReaderError as error:
        place = place_at(text, error.position, name)
        raise ConfigError(
            f"{place}: a character that YAML does not allow (got {error.character!r}); remove it."
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_problem(error, name)) from None
    if node is None:
        raise ConfigError(
            f"{name}: is empty; write one with: shardkit config --defaults --force -o {shlex.quote(name)}"
        )
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else f"{shortened(node.value)!r}"
        raise ConfigError(f"{place_of(node, name)}: is not made of `key: value` lines (got {what}); write settings so.")
    _refuse_bombs(node, name)
    return node


def unwelcome(node: yaml.Node, name: str) -> list[str]:
    """Problems of a file: tags, keys that are not names, duplicate keys."""
    return list(dict.fromkeys(f"{place_of(at, name)}: {text}" for at, text in _unwelcome(node)))


def place_of(node: yaml.Node, name: str) -> Location:
    """The place where a node begins."""
    return Location(name, node.start_mark.line + 1, node.start_mark.column + 1)


def place_at(text: str, index: int, name: str) -> Location:
    """The place of the character at an index."""
    before = text[:index]
    return Location(name, before.count("\n") + 1, index - (before.rfind("\n") + 1) + 1)


def pairs(node: yaml.MappingNode) -> list[tuple[str, yaml.Node, yaml.Node]]:
    """(key, key node, value node) in order. Written keys win over keys that `<<` merges in."""
    found: dict[str, tuple[str, yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            for merged in _merged_blocks(value):
                found |= {triple[0]: triple for triple in pairs(merged) if triple[0] not in found}
    for key, value in node.value:
        if key.tag != _MERGE and isinstance(key, yaml.ScalarNode):
            found[key.value] = (key.value, key, value)
    return list(found.values())


def raw(node: yaml.Node) -> Any:
    """The value with its scalars as text; None for an empty value, `~` or `null`."""
    if isinstance(node, yaml.MappingNode):
        return {key: raw(value) for key, _, value in pairs(node)}
    if isinstance(node, yaml.SequenceNode):
        return [raw(item) for item in node.value]
    return None if node.tag == _PLAIN + "null" else node.value


def typed(node: yaml.Node, where: str = "") -> Any:
    """The value as YAML types it, for settings that are passed through. Raises ConfigError, after `where`, for what has
    no value, such as 2024-13-45, which looks like a date."""
    constructor = yaml.SafeLoader("")
    try:
        return constructor.construct_document(node)
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
        reason = getattr(error, "problem", None) or error
        what = f"has a value that YAML does not read ({shortened(reason, 80)}); write it in quotes."
        raise ConfigError(f"{where}: {what}" if where else what) from None


def shortened(text: Any, limit: int = 40) -> str:
    """A value for a message, an enum's as in a file: one line, at most `limit` characters."""
    line = " ".join(str(text.value if isinstance(text, Enum) else text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _merged_blocks(node: yaml.Node) -> list[yaml.MappingNode]:
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [inner for inner in nodes if isinstance(inner, yaml.MappingNode)]


def _refuse_bombs(node: yaml.Node, name: str) -> None:
    """Raises ConfigError where following aliases would explode or never end."""
    left, waiting = MAX_VALUES, [(node, 0)]
    while waiting:
        at, depth = waiting.pop()
        left -= 1
        if left <= 0 or depth > MAX_DEPTH:
            raise ConfigError(
                f"{place_of(at, name)}: too many nested values or aliases for a configuration; write the values out."
            )
        if isinstance(at, yaml.SequenceNode):
            waiting += [(item, depth + 1) for item in at.value]
        elif isinstance(at, yaml.MappingNode):
            waiting += [(item, depth + 1) for pair in at.value for item in pair]


def _unwelcome(node: yaml.Node) -> Iterator[tuple[yaml.Node, str]]:
    if node.tag not in _TAGS:
        yield node, f"tags are not read (got {shortened(node.tag.replace(_PLAIN, '!!'))}); write the plain value."
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _unwelcome(item)
    elif isinstance(node, yaml.MappingNode):
        yield from _unwelcome_keys(node)
        for _, value in node.value:
            yield from _unwelcome(value)


def _unwelcome_keys(node: yaml.MappingNode) -> Iterator[tuple[yaml.Node, str]]:
    first: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.tag == _MERGE:
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not all(isinstance(one, yaml.MappingNode) for one in merged):
                yield key, "<< merges blocks of keys only; name one with an alias, as in `<<: *base`."
        elif not isinstance(key, yaml.ScalarNode) or key.tag not in _TAGS:
            yield key, "a key must be a plain name."
        elif key.value in first:
            line = first[key.value].start_mark.line + 1
            yield key, f"{shortened(key.value)}: is given twice (first in line {line}); keep one of them."
        else:
            first[key.value] = key


def _syntax_problem(error: yaml.MarkedYAMLError, name: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    problem = error.problem or "is not YAML"
    if "'\\t'" in problem:
        is_indent = mark is not None and mark.column == 0
        return f"{where}: {'indented with a tab; indent with spaces' if is_indent else 'a tab; write spaces'}."
    if "expected a single document" in (error.context or ""):
        return f"{where}: a second document begins here (got ---); a configuration is one document."
    context = f", {error.context}" if error.context else ""
    return f"{where}: is not YAML: {shortened(problem + context, 120)}; check the indentation, colons and quotes."
