"""What a script means by a path: links are followed, so that what is saved lies where they lead, and they stay."""

import os
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.storage.url import Place, Url, place_of


def named(path: Any, caller: str) -> Place:
    """The folder or file that a script names, `~` expanded and links followed; or the place in a store of objects.

    UsageError where it names none.
    """
    if not isinstance(path, (str, os.PathLike, Url)) or not str(path):
        what = "file" if caller == "save" else "folder"
        raise UsageError(f"{caller}: the {what} has no name (got {path!r}); name one.")
    place = place_of(path)
    if isinstance(place, Url):
        return place
    found = Path(os.path.realpath(os.path.expanduser(place)))
    if found.is_symlink():
        raise UsageError(f"{caller}: {path}: a link that leads back to itself; give another name.")
    return found


def on_disk(path: Any, caller: str, advice: str = "give a folder on a disk") -> Path:
    """As `named`, where no store of objects will do: UsageError for one, with the advice."""
    found = named(path, caller)
    if isinstance(found, Url):
        raise UsageError(f"{caller}: files are written here, which a store of objects has not (got {found}); {advice}.")
    return found


def real(place: Place) -> Place:
    """The same for two names of one place."""
    return place if isinstance(place, Url) else place.resolve()


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
