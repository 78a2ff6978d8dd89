"""The folders of a launch: the log folder, which stays, and a temporary one for files that its ranks write for it.

Logs contain paths, settings, arguments and the output of scripts, so folders and files are readable by their owner
only.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shardkit.errors import MachineError
from shardkit.launch import rank_files
from shardkit.launch.rank_files import private

PREFIX = "shardkit-"
IN_USE = "in-use"
"""The file in a run's temporary folder that its launcher keeps locked until its process ends."""
PRIVATE = 0o700
SPACE_BYTES = 1 << 18
"""Free space that a temporary folder must have: the state and the traceback of each rank are a few KiB."""


def make_log_dir(configured: str | None) -> Path:
    """Create the log folder; with a new name under runs/ if none is configured. Raises MachineError."""
    if configured:
        path = Path(os.path.expanduser(configured))
        with writable(path):
            path.mkdir(PRIVATE, parents=True, exist_ok=True)
        return path
    stem = time.strftime("runs/%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = Path(stem if number == 1 else f"{stem}-{number}")
        with writable(path):
            try:
                path.mkdir(PRIVATE, parents=True)
            except FileExistsError:  # another launch in this second uses it
                continue
            return path
    raise MachineError(f"launch: {stem}: no unused name for the log folder; give one with --logs DIR.")


@contextlib.contextmanager
def held(log_dir: Path, machine: int) -> Iterator[None]:
    """A context in which no other launch with this machine's number writes into the log folder: their lines would mix.
    Raises MachineError if one does.

    The lock is the process's own: ranks that outlive a killed launcher for a moment do not hold it.
    """
    with contextlib.ExitStack() as stack:
        with writable(log_dir):
            path = log_dir / f".launcher{machine}.lock"
            file = stack.enter_context(open(path, "a+", encoding="utf-8", opener=private))
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            who = file.read(200) or "it has just begun"
            raise MachineError(
                f"launch: log folder {log_dir} is in use by another launch ({who}), "
                "and the lines of both would mix; give another one with --logs DIR."
            ) from None
        except OSError:  # the file system has no locks
            pass
        with writable(log_dir):
            file.truncate(0)
            # Past the file's buffer, which on a full disk would fail again as the file is closed, in other words.
            os.write(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()}".encode())
        yield


@contextlib.contextmanager
def writable(log_dir: Path) -> Iterator[None]:
    """A context for writing to the log folder. Turns OSError into MachineError."""
    try:
        yield
    except FileExistsError:
        raise MachineError(f"launch: log folder {log_dir} is a file; give another one with --logs DIR.") from None
    except OSError as error:
        raise MachineError(
            f"launch: log folder {log_dir} cannot be written ({error.strerror}); give another one with --logs DIR."
        ) from None


def write(path: Path, text: str) -> None:
    """Write text to a file that only this user can read."""
    with open(path, "w", encoding="utf-8", opener=private) as file:
        file.write(text)
    path.chmod(0o600)  # the file may exist from an earlier run


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """A temporary folder of this launch, local to the machine. Also removes those of killed launches. Raises
    MachineError."""
    where = Path(tempfile.gettempdir())
    remove_orphans(where)
    with contextlib.ExitStack() as stack:
        try:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True))
            stack.enter_context(locked(Path(name)))
            check_space(Path(name))
            check_pipes(Path(name))
        except OSError as error:
            raise MachineError(
                f"launch: the temporary folder {where} cannot be used ({error.strerror}); free some space there, or "
                "set TMPDIR to a folder on another disk."
            ) from None
        yield Path(name)


def check_space(folder: Path) -> None:
    """Raises OSError if the folder has no space for what ranks write there."""
    path = folder / "space"
    with path.open("wb") as file:
        rank_files.reserve(file.fileno(), SPACE_BYTES)
    path.unlink()


def check_pipes(folder: Path) -> None:
    """Raises OSError if the file system has no named pipes, as exFAT, SMB and Windows' disks in WSL."""
    path = folder / "pipe"
    os.mkfifo(path)
    path.unlink()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A context in which the folder is marked as in use by a lock, which also ends with the process."""
    unlocked = folder / f"{IN_USE}.new"
    with unlocked.open("w") as file:
        with contextlib.suppress(OSError):  # without locks in the file system, it is never removed as an orphan
            fcntl.flock(file, fcntl.LOCK_EX)
            unlocked.rename(folder / IN_USE)
        yield


def remove_orphans(where: Path) -> None:
    """Remove this user's temporary folders of killed launches (SIGKILL, out of memory)."""
    for path in where.glob(f"{PREFIX}*/{IN_USE}"):
        with contextlib.suppress(OSError), path.open() as file:
            if path.parent.lstat().st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its launcher is still running
                shutil.rmtree(path.parent, ignore_errors=True)


def short(path: Path) -> str:
    """The path, relative to the working folder if it is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
