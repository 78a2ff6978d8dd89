"""The line `# model: SPEC` of a configuration file: the model it was written for. Read by `config` and `plan`."""

import re
import shlex
from contextlib import suppress
from pathlib import Path

from shardkit.config.files import text_of_file

_LINE = re.compile(r"^#[ \t]*model:[ \t]*(?P<rest>\S[^\r\n]*)", re.MULTILINE)
_WORD = re.compile(r"""[^\s'"]+""")


def read(text: str) -> str | None:
    """The model that the file names, or None. A remark may follow it."""
    found = _LINE.search(text)
    if found is None:
        return None
    if found["rest"][0] in "'\"":  # a path with spaces
        with suppress(ValueError):
            return _first_word(found["rest"])
    return found["rest"].split()[0]


def _first_word(text: str) -> str | None:
    """The first of the words that shlex.split gives; what follows may have a quote of its own. Raises ValueError."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters = True, ""
    return words.get_token()


def in_file(path: Path | None) -> str | None:
    """The model that a configuration file names, or None. Raises ConfigError where the file cannot be read."""
    return None if path is None else read(text_of_file(path))


def write(text: str, spec: str) -> str:
    """The file's text with that line replaced, or inserted after the comment lines at the top; as it is where it names
    that model already."""
    if read(text) == spec:
        return text
    line = f"# model: {spec if _WORD.fullmatch(spec) else shlex.quote(spec)}"
    if _LINE.search(text):
        return _LINE.sub(lambda _: line, text, count=1)
    new_line = "\r\n" if "\r\n" in text else "\n"
    top = re.match(r"(#.*\n)*", text)
    assert top is not None
    return f"{text[: top.end()]}{line}{new_line}{text[top.end() :]}"
