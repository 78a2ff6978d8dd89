"""Says where this rank is, so that the launcher can tell a hang from work and name the rank that stopped first.

progress.post("forward", step)       cheap (microseconds), from the main thread; does nothing when not launched
with progress.paused("pause", step)  inside, anything may take any time: the launcher does not count it
progress.leave("done", step)         from here on nothing is counted any more
progress.committed(step)             a checkpoint is complete; restarts go on while this grows
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from shardkit import env
from shardkit.launch import names
from shardkit.launch.rank_files import ProgressWriter

_pauses: list[str] = []
"""The pauses that this rank is in, the outer one first."""


def post(phase: str, step: int) -> None:
    """This rank enters `phase` of optimizer step `step`; the launcher counts its seconds from here; not in a pause."""
    writer = _writer()
    if writer is not None:
        writer.post(phase, step, is_watched=not _pauses)


@contextmanager
def paused(phase: str, step: int) -> Iterator[None]:
    """Inside, this rank may take any time, whatever else it posts there."""
    _pauses.append(phase)
    post(phase, step)
    try:
        yield
    finally:
        _pauses.pop()
        post(f"after {phase}" if not _pauses else _pauses[-1], step)


def leave(phase: str, step: int) -> None:
    """What follows may take any time, until the next post."""
    writer = _writer()
    if writer is not None:
        writer.post(phase, step, is_watched=False)


def committed(step: int) -> None:
    """The checkpoint of `step` is complete on disk. The launcher's restarts count their progress by it. Any thread."""
    writer = _writer()
    if writer is not None:
        writer.committed(step)


@cache
def _writer() -> ProgressWriter | None:
    folder, ranks = env.get(names.PROGRESS_DIR), env.ranks()
    if not folder or ranks is None or not Path(folder).is_dir():
        return None
    return ProgressWriter(Path(folder), ranks.rank, ranks.local_rank)
