"""What a script means by a path: links are followed, so that what is saved lies where they lead, and they stay."""

import os
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError


def named(path: Any, caller: str) -> Path:
    """The folder or file that a script names, `~` expanded and links followed. UsageError where it names none."""
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        what = "file" if caller == "save" else "folder"
        raise UsageError(f"{caller}: the {what} has no name (got {path!r}); name one.")
    found = Path(os.path.realpath(os.path.expanduser(os.fspath(path))))
    if found.is_symlink():
        raise UsageError(f"{caller}: {path}: a link that leads back to itself; give another name.")
    return found


def refuse_working_folder(path: Path, caller: str, given: Any) -> None:
    """UsageError where the folder is the one that this process works in, or holds it: it is replaced as a whole."""
    try:
        here = Path(os.path.realpath(os.getcwd()))
    except FileNotFoundError:  # deleted under our feet: nothing can replace it
        return
    if path == here or path in here.parents:
        what = "is the working folder" if path == here else f"holds the working folder {here}"
        raise UsageError(
            f"{caller}: {given}: {what}, and what is saved replaces its folder as a whole; "
            f"name a folder below it, such as {Path(given) / 'checkpoint'}."
        )
