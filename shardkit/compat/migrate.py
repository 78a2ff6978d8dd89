"""Rewrites a script's imports of Accelerate to shardkit.compat: `shardkit migrate script.py` prints the diff."""

import ast
import difflib
import re
from pathlib import Path

from shardkit.compat import scan
from shardkit.compat.scan import Found
from shardkit.errors import UsageError

BYTE_ORDER_MARK = "\ufeff"
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
"""A line as Python counts them, with its end: `str.splitlines` also splits at form feeds and Unicode separators."""


def migrated(text: str, file: str = "script.py") -> str:
    """The text with only its imports changed. Raises UsageError if it is not valid Python."""
    try:
        tree = ast.parse(text.removeprefix(BYTE_ORDER_MARK))
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
    lines = _LINE.findall(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if scan.below_accelerate(node.module) is not None:
                _replace(lines, node, f"from {node.module}", f"from {_ours(node.module)}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if scan.below_accelerate(alias.name) is not None:
                    _replace_import(lines, node, alias)
    return "".join(lines)


def _ours(module: str) -> str:
    return module.replace("accelerate", "shardkit.compat", 1)


def _replace_import(lines: list[str], node: ast.Import, alias: ast.alias) -> None:
    """Rewrites one alias of an `import` statement, so that the name that the script uses stays the same."""
    if alias.asname:
        _replace(lines, node, alias.name, _ours(alias.name))
    elif alias.name == "accelerate":
        _replace(lines, node, "accelerate", "shardkit.compat as accelerate")
    else:  # `import accelerate.utils` binds accelerate; the submodules of shardkit.compat need no import
        _replace(lines, node, alias.name, "shardkit.compat as accelerate")


def _replace(lines: list[str], node: ast.stmt, old: str, new: str) -> None:
    """Replaces the first occurrence of `old` in the lines of the statement."""
    end = node.end_lineno or node.lineno
    for number in range(node.lineno - 1, end):
        start = node.col_offset if number == node.lineno - 1 else 0
        head, tail = lines[number][:start], lines[number][start:]
        if old in tail and new not in tail:
            lines[number] = head + tail.replace(old, new, 1)
            return


def source(path: Path) -> str:
    """The text of a script, with its line ends as they are. Raises UsageError where it cannot be read."""
    try:
        if not path.is_file() and path.exists():
            raise OSError("not a regular file")
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"migrate: {path}: cannot be read ({error}); give a Python file in UTF-8.") from error


def diff(path: Path) -> tuple[str, Found]:
    """(the change of one file as a unified diff, empty without changes; the names of Accelerate that it uses)."""
    text = source(path)
    new = migrated(text, str(path))
    change = difflib.unified_diff(_LINE.findall(text), _LINE.findall(new), str(path), f"{path} on shardkit")
    return "".join(change), scan.scan_text(text, path.name)


def remarks(found: Found) -> list[str]:
    """What the new imports do not solve: unsupported names, and differences in behavior."""
    lines = [f"{one.place}: {one.name}: is not supported; {one.text}." for one in [*found.refused, *found.missing]]
    return lines + [f"{one.place}: {one.name}: {one.text}." for one in found.remarks]
