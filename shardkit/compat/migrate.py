"""A script's change from Accelerate's imports to shardkit's: `shardkit migrate script.py` prints it as a diff."""

import ast
import difflib
from pathlib import Path

from shardkit.compat import scan
from shardkit.compat.scan import Found
from shardkit.errors import UsageError


def migrated(text: str, file: str = "script.py") -> str:
    """The text with its imports changed, and nothing else. UsageError where it is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"migrate: {file}:{error.lineno}: is no Python that this one reads ({error.msg}).") from error
    lines = text.splitlines(keepends=True)
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
    """`import accelerate` keeps the name that the script uses; of several imports in one line each is changed."""
    if alias.asname:
        _replace(lines, node, alias.name, _ours(alias.name))
    elif alias.name == "accelerate":
        _replace(lines, node, "accelerate", "shardkit.compat as accelerate")
    else:  # binds accelerate, and makes sure that the module below it is there: here it always is
        _replace(lines, node, alias.name, "shardkit.compat as accelerate")


def _replace(lines: list[str], node: ast.stmt, old: str, new: str) -> None:
    """The first place of the words in the statement's own lines."""
    end = node.end_lineno or node.lineno
    for number in range(node.lineno - 1, end):
        start = node.col_offset if number == node.lineno - 1 else 0
        head, tail = lines[number][:start], lines[number][start:]
        if old in tail and new not in tail:
            lines[number] = head + tail.replace(old, new, 1)
            return


def diff(path: Path) -> tuple[str, Found]:
    """The change of one file as a unified diff, empty where there is none; and what the file names of Accelerate."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"migrate: {path}: cannot be read ({error}); name a Python file.") from error
    new = migrated(text, str(path))
    change = difflib.unified_diff(
        text.splitlines(keepends=True), new.splitlines(keepends=True), str(path), f"{path} on shardkit"
    )
    return "".join(change), scan.scan_text(text, path.name)


def remarks(found: Found) -> list[str]:
    """What an import alone does not change: refused names, and what means another thing."""
    lines = [f"{one.place}: {one.name}: is not taken; {one.text}." for one in [*found.refused, *found.missing]]
    return lines + [f"{one.place}: {one.name}: {one.text}." for one in found.remarks]
