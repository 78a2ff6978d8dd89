"""Rewrites a script's imports of Accelerate to shardkit.compat: `shardkit migrate script.py` prints the diff."""

import ast
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.compat import scan
from shardkit.compat.bindings import below_accelerate, dotted
from shardkit.compat.scan import Found, Named
from shardkit.errors import UsageError

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as Python counts them, with its end: `str.splitlines` also splits at form feeds and Unicode separators."""


def _parsed(text: str, file: str) -> ast.Module:
    """Raises UsageError if the text is not valid Python."""
    if file.endswith(".ipynb"):  # JSON, which is valid Python
        raise UsageError(
            f"migrate: {file}: only Python scripts are changed (got a notebook); in its cells, write `shardkit.compat` "
            "for `accelerate` in imports."
        )
    try:
        return ast.parse(text.removeprefix(scan.BYTE_ORDER_MARK))
    except SyntaxError as error:
        if "accelerate launch" in text:
            raise UsageError(
                f"migrate: {file}: only Python scripts are changed (got a shell script?); in it, write "
                "`shardkit launch --as-accelerate` for `accelerate launch`, with the same flags."
            ) from error
        raise UsageError(
            f"migrate: {file}:{error.lineno}: not valid Python for this interpreter ({error.msg}); correct the file."
        ) from error
    except (ValueError, *scan.TOO_DEEP):
        raise UsageError(f"migrate: {file}: Python cannot read it (nested too deeply); correct the file.") from None


def _changed(text: str, tree: ast.Module) -> str:
    """The text with only its imports changed."""
    mark = scan.BYTE_ORDER_MARK if text.startswith(scan.BYTE_ORDER_MARK) else ""
    lines = _LINE.findall(text.removeprefix(mark))
    # From the end of the file, so that the places of the others stay.
    for node, old, new in sorted(_changes(tree), key=lambda one: (one[0].lineno, one[0].col_offset), reverse=True):
        _replace(lines, node, old, new)
    return mark + "".join(lines)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.alias, str, str]]:
    """(where, the module of Accelerate there, what replaces it) of all imports. The names that the script uses stay the
    same: `import accelerate.utils` binds accelerate, and the submodules of shardkit.compat need no import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if below_accelerate(node.module) is not None:
                yield node, node.module, _ours(node.module)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if below_accelerate(alias.name) is not None:
                    yield alias, alias.name, _ours(alias.name) if alias.asname else "shardkit.compat as accelerate"


def _ours(module: str) -> str:
    return module.replace("accelerate", "shardkit.compat", 1)


def _replace(lines: list[str], node: ast.stmt | ast.alias, old: str, new: str) -> None:
    """Replaces `old`, the first such word of the node, in the lines of the file."""
    end = node.end_lineno or node.lineno
    for number in range(node.lineno - 1, end):
        line = lines[number].encode()  # Python counts columns in bytes
        start = node.col_offset if number == node.lineno - 1 else 0
        changed = re.sub(rf"\b{re.escape(old)}\b", new, line[start:].decode(), count=1)
        if changed.encode() != line[start:]:
            lines[number] = line[:start].decode() + changed
            return


def scripts(given: Sequence[Path]) -> list[Path]:
    """The files to change; of a folder those below it that mention Accelerate, hidden folders and packages that are
    installed there aside."""
    found = [path for one in given for path in (_below(one) if one.is_dir() else [one])]
    return list(dict.fromkeys(found))


def _below(folder: Path) -> list[Path]:
    inside: list[Path] = []
    for where, folders, names in os.walk(folder):  # leaves out folders that cannot be read
        folders[:] = [name for name in folders if not name.startswith(".") and name != "site-packages"]
        inside += [Path(where, name) for name in names if name.endswith(".py") and not name.startswith(".")]
    found = [path for path in sorted(inside) if path.is_file() and _mentions_accelerate(path)]
    if not found:
        raise UsageError(f"migrate: {folder}: no Python file below this folder mentions accelerate; name the scripts.")
    return found


def _mentions_accelerate(path: Path) -> bool:
    try:
        return b"accelerate" in path.read_bytes()
    except OSError:  # told by `source`
        return True


def source(path: Path) -> str:
    """The text of a script, with its line ends as they are. Raises UsageError where it cannot be read."""
    try:
        if not path.exists():
            raise UsageError(f"migrate: {path}: no such file or folder; check the path.")
        if not path.is_file():
            raise OSError("not a regular file")
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"migrate: {path}: cannot be read ({error}); give a Python file in UTF-8.") from error


@dataclass(frozen=True)
class Change:
    """What becomes of one script."""

    path: Path
    old: str
    new: str
    found: Found
    """The names of Accelerate that it uses."""

    def diff(self) -> str:
        """The change as a unified diff; empty without changes."""
        names = str(self.path), f"{self.path} on shardkit"
        lines = difflib.unified_diff(_LINE.findall(self.old), _LINE.findall(self.new), *names)
        ended = (line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)
        return "".join(ended)


def change_of(path: Path) -> Change:
    """The change of one file. Raises UsageError if it cannot be read or is not valid Python."""
    return change_in(source(path), path)


def change_in(text: str, path: Path = Path("script.py")) -> Change:
    """The change of a text of this file. Raises UsageError if it is not valid Python."""
    file = str(path)
    tree = _parsed(text, file)
    found = scan.scan_tree(tree, file)
    found.remarks += [Named(file, line, name, remark) for line, name, remark in _in_texts(tree)]
    return Change(path, text, _changed(text, tree), found)


BY_TEXT = "is imported by a text, which is not changed; write shardkit.compat in it"
STARTS = "starts Accelerate's launcher, and is not changed; write shardkit launch --as-accelerate, with the same flags"


def _in_texts(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, what, remark) where a text names Accelerate: `importlib.import_module("accelerate.utils")`, `__import__`,
    and commands, `"accelerate launch ..."` and `["accelerate", "launch", ...]`."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, args=[ast.Constant(value=str(module)), *_]):
                is_import = dotted(function)[-1:] in (["import_module"], ["__import__"])
                if is_import and below_accelerate(module) is not None:
                    yield node.lineno, module, BY_TEXT
            case ast.Constant(value=str(text)) if text.split()[:2] == ["accelerate", "launch"]:
                if id(node) not in docstrings:  # which have examples of use
                    yield node.lineno, "accelerate launch", STARTS
            case ast.List(elts=words) | ast.Tuple(elts=words):
                if [getattr(word, "value", None) for word in words[:2]] == ["accelerate", "launch"]:
                    yield node.lineno, "accelerate launch", STARTS


def remarks(found: Found) -> list[str]:
    """What the new imports do not solve: unsupported names, and differences in behavior."""
    lines = [f"{one.place}: {one.name}: is not supported; {one.text}." for one in [*found.refused, *found.missing]]
    lines += [f"{one.place}: {one.name}: {one.text}." for one in found.remarks]
    return lines + scan.differences(found)
