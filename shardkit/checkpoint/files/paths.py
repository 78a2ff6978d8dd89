"""Paths that a script gives. Links are followed, so that files are saved at their targets and the links stay."""

import os
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.storage.url import Place, Url, place_of


def named(path: Any, caller: str) -> Place:
    """The folder or file for a path, with `~` expanded and links followed; or the place in an object store.

    Raises UsageError if the path is empty or not a path.
    """
    if not isinstance(path, (str, os.PathLike, Url)) or not str(path):
        what = "file" if caller == "save" else "folder"
        raise UsageError(f"{caller}: not the path of a {what} (got {path!r}); give a path.")
    place = place_of(path)
    if isinstance(place, Url):
        return place
    found = Path(os.path.realpath(place))
    if found.is_symlink():
        raise UsageError(f"{caller}: {path}: is a link to itself; give another path.")
    return found


def on_disk(path: Any, caller: str, advice: str = "give a folder on a disk") -> Path:
    """As `named`, for a path on a disk: an object store raises UsageError with the advice."""
    found = named(path, caller)
    if isinstance(found, Url):
        raise UsageError(f"{caller}: an object store is not supported here (got {found}); {advice}.")
    return found


def absolute(place: Place) -> Place:
    """The path from the root, which stays the same where the script changes its working folder."""
    return place if isinstance(place, Url) else Path(os.path.abspath(place))


def real(place: Place) -> Place:
    """The canonical path, equal for two names of one place."""
    return place if isinstance(place, Url) else place.resolve()


def refuse_working_folder(path: Path, given: Any) -> None:
    """Raises UsageError if the folder is the working folder or a parent of it, since a save replaces its folder."""
    try:
        here = Path(os.path.realpath(os.getcwd()))
    except FileNotFoundError:  # the working folder was deleted
        return
    if path == here or path in here.parents:
        what = "is the working folder" if path == here else f"contains the working folder {here}"
        raise UsageError(
            f"save_state: {given}: {what}, and a save would replace the whole folder; "
            f"give a folder below it, such as {Path(given) / 'checkpoint'}."
        )
