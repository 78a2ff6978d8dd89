"""Says where this rank is, so that the launcher can tell a hang from work and name the rank that stopped first.

progress.post("forward", step)       cheap (microseconds), from the main thread; does nothing when not launched
progress.pause()                     what follows may take any time: the launcher does not count it
progress.committed(step)             a checkpoint is complete; restarts go on while this grows
"""

from functools import cache
from pathlib import Path

from shardkit import env
from shardkit.launch import names
from shardkit.launch.records import PlaceWriter


def post(phase: str, step: int) -> None:
    """This rank enters `phase` of optimizer step `step`; from now on the launcher counts its seconds."""
    writer = _writer()
    if writer is not None:
        writer.post(phase, step)


def pause(phase: str = "paused", step: int = 0) -> None:
    """This rank does something that may take any time, such as an evaluation; it is not watched until the next post."""
    writer = _writer()
    if writer is not None:
        writer.post(phase, step, is_watched=False)


def committed(step: int) -> None:
    """The checkpoint of `step` is complete on disk. The launcher's restarts count their progress by it. Any thread."""
    writer = _writer()
    if writer is not None:
        writer.committed(step)


@cache
def _writer() -> PlaceWriter | None:
    folder, ranks = env.get(names.PROGRESS_DIR), env.ranks()
    if not folder or ranks is None or not Path(folder).is_dir():
        return None
    return PlaceWriter(Path(folder), ranks.rank, ranks.local_rank)
