"""The folders of a launch: the logs', which stay, and one for what its ranks leave for it while they run. Both private.

Logs hold paths, settings, arguments and whatever a script prints: folders and files that are made here are for their
owner alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardkit.errors import MachineError
from shardkit.launch.rank_files import private

PREFIX = "shardkit-"
IN_USE = "in-use"
"""The file in a run's temporary folder that its launcher keeps locked for as long as it lives, however it ends."""
PRIVATE = 0o700


def make_log_dir(configured: str | None) -> Path:
    """The folder for the logs, made; a name of its own where none is configured. Raises MachineError."""
    if configured:
        path = Path(configured)
        with writable(path):
            path.mkdir(PRIVATE, parents=True, exist_ok=True)
        return path
    stem = time.strftime("runs/%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = Path(stem if number == 1 else f"{stem}-{number}")
        with writable(path):
            try:
                path.mkdir(PRIVATE, parents=True)
            except FileExistsError:  # another launch of this second has it
                continue
            return path
    raise MachineError(f"launch: {stem}: no free name for the logs; give --logs DIR.")


@contextlib.contextmanager
def writable(log_dir: Path) -> Iterator[None]:
    """What is written into the log folder inside. Raises MachineError with what the system says."""
    try:
        yield
    except FileExistsError:
        raise MachineError(f"launch: log folder {log_dir} is a file; give another one with --logs DIR.") from None
    except OSError as error:
        raise MachineError(
            f"launch: log folder {log_dir} cannot be written ({error.strerror}); give another one with --logs DIR."
        ) from None


def write(path: Path, text: str) -> None:
    """Put a text into a file that only this user may read."""
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)
    path.chmod(0o600)  # it may be there from a run before


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A folder of this launch's own, local to the machine; gone afterwards. Those that killed ones left go first."""
    remove_orphans(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name, locked(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder counts as in use inside, and until this process is gone."""
    unlocked = folder / f"{IN_USE}.new"
    with unlocked.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it as an orphan either
            fcntl.flock(file, fcntl.LOCK_EX)
            unlocked.rename(folder / IN_USE)
        yield


def remove_orphans(where: Path) -> None:
    """Remove this user's folders of launches that are gone and could not do it themselves (SIGKILL, out of memory)."""
    for path in where.glob(f"{PREFIX}*/{IN_USE}"):
        with contextlib.suppress(OSError), path.open() as file:
            if path.parent.lstat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its launcher still lives
                shutil.rmtree(path.parent, ignore_errors=True)


def short(path: Path) -> str:
    """The path as seen from the working folder, where it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
