"""The docs page of all settings, from the schema."""

from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from typing import Any

from shardkit.config.descriptions import text_of
from shardkit.config.keys import SYNONYMS, Key, all_keys

HEAD = """# The configuration file

Every key of `shardkit.yaml`, in the order of the schema, with its name in Python where that differs. The keys are
Accelerate's; what Accelerate has no key for stands under `shardkit:`. On the command line: `--set KEY=VALUE`, by either
name. A key that is left out has its default, and `shardkit config show --origin` says where each value comes from.
`shardkit config schema` prints a JSON Schema with which editors complete and check the file.
This page is written by `make docs` from the schema.
"""


def configuration_page() -> str:
    """The page, in Markdown: one table a section."""
    sections = groupby(all_keys().values(), key=lambda key: key.yaml_name.rpartition(".")[0])
    tables: dict[str, list[Key]] = {}
    for section, keys in sections:
        tables.setdefault(section, []).extend(keys)
    return "\n".join([HEAD, *(_table(section, keys) for section, keys in tables.items()), _older_spellings()])


def _table(section: str, keys: list[Key]) -> str:
    title = f"## `{section}:`" if section else "## Top level"
    return "\n".join([title, "", "| key | default | what it says |", "|---|---|---|", *map(_row, keys), ""])


def _row(key: Key) -> str:
    name = key.yaml_name.rpartition(".")[2]
    text = text_of(key.section, key.path[-1]).replace("|", "\\|")
    other = "" if key.name == key.yaml_name else f"<br>`{key.name}`"
    return f"| `{name}`{other} | `{_shown(key.default)}` | {text} |"


def _shown(default: Any) -> str:
    """As it would stand in the file."""
    match default:
        case None:
            return "null"
        case bool():
            return str(default).lower()
        case Enum():
            return str(default.value)
        case _:
            return str(default)


def _older_spellings() -> str:
    return "\n".join(["## Other spellings that are read", "", "| read | means |", "|---|---|", *_spellings(), ""])


def _spellings() -> Iterator[str]:
    for section, names in SYNONYMS.items():
        for other, name in names.items():
            prefix = f"{section}." if section else ""
            yield f"| `{prefix}{other}` | `{prefix}{name}` |"
