"""The line `# model: SPEC` of a configuration file: the model it was written for. Read by `config` and `plan`."""

import re
from pathlib import Path

from shardkit.config.files import text_of_file

_LINE = re.compile(r"^#\s*model:[ \t]*(?P<spec>\S+).*$", re.MULTILINE)


def read(text: str) -> str | None:
    """The model that the file names, or None."""
    found = _LINE.search(text)
    return found["spec"] if found else None


def in_file(path: Path | None) -> str | None:
    """The model that a configuration file names, or None. Raises ConfigError where the file cannot be read."""
    return None if path is None else read(text_of_file(path))


def write(text: str, spec: str) -> str:
    """The file's text with that line replaced, or inserted after the comment lines at the top."""
    line = f"# model: {spec}"
    if _LINE.search(text):
        return _LINE.sub(lambda _: line, text, count=1)
    lines = text.splitlines()
    top = next((index for index, old in enumerate(lines) if not old.startswith("#")), len(lines))
    return "\n".join([*lines[:top], line, *lines[top:]]) + "\n"
