"""Posts this rank's phase and step, so that the launcher can detect hangs and name the rank that stopped first.

progress.post("backward", step)      cheap (microseconds), from the main thread; does nothing when not launched
progress.begin_loop()                a loop over a loader begins
progress.note_backward(step)         a backward has ended, which the script may have called itself
with progress.paused("pause", step)  inside, the launcher's hang detection is off
progress.leave("done", step)         hang detection is off from here on
progress.committed(step)             a checkpoint is committed; restarts continue while this grows
progress.configured()                the script has taken the run's configuration
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from shardkit import env
from shardkit.launch import names
from shardkit.launch.rank_files import ProgressWriter

_pauses: list[str] = []
"""The current pauses of this rank, outermost first."""


def post(phase: str, step: int | None = None) -> None:
    """This rank enters `phase` of optimizer step `step` (None: of the present one); restarts the launcher's hang clock,
    unless in a pause."""
    writer = _writer()
    if writer is not None:
        writer.post(phase, step, is_watched=not _pauses)


def begin_loop() -> None:
    """A loop over a loader begins. Not the first of a script, whose first batch may be long in coming: the launcher's
    hang clock starts with that."""
    writer = _writer()
    if writer is not None and writer.phase != "starting":
        post("data")


def note_backward(step: int) -> None:
    """A backward has ended. One of the script itself (`loss.backward()`) has not been posted, and without it the
    forwards of a micro-batch would count as an evaluation."""
    writer = _writer()
    if writer is not None and writer.phase == "forward":
        post("backward", step)


@contextmanager
def paused(phase: str, step: int) -> Iterator[None]:
    """Context without hang detection, regardless of other posts inside."""
    _pauses.append(phase)
    post(phase, step)
    try:
        yield
    finally:
        _pauses.pop()
        post(f"after {phase}" if not _pauses else _pauses[-1], step)


def leave(phase: str, step: int) -> None:
    """Turns hang detection off until the next post."""
    writer = _writer()
    if writer is not None:
        writer.post(phase, step, is_watched=False)


def committed(step: int) -> None:
    """The checkpoint of `step` is committed. The launcher measures the progress between restarts by it. Any thread."""
    writer = _writer()
    if writer is not None:
        writer.committed(step)


def configured() -> None:
    """The script has taken the run's configuration: the launcher warns where none has."""
    writer = _writer()
    if writer is not None:
        writer.configured()


@cache
def _writer() -> ProgressWriter | None:
    folder, ranks = env.get(names.PROGRESS_DIR), env.ranks()
    if not folder or ranks is None or not Path(folder).is_dir():
        return None
    return ProgressWriter(Path(folder), ranks.rank, ranks.local_rank)
