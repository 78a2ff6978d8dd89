"""Rank-aware logging: warnings and errors of every rank, information of rank 0 only."""

import logging
import sys

from shardkit import env


class _RankFilter(logging.Filter):
    """Drops messages below WARNING on ranks other than 0, for all handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or _rank() == 0


def _rank() -> int:
    """That of the process group, which a script may have started without variables (`mp.spawn`); else the launcher's;
    0 for a single process. This module loads no torch."""
    dist = sys.modules.get("torch.distributed")
    if getattr(dist, "is_initialized", lambda: False)():
        return dist.get_rank()  # type: ignore[union-attr]
    ranks = env.ranks()
    return 0 if ranks is None else ranks.rank


class _CurrentStderr(logging.StreamHandler):
    """Writes to the current sys.stderr, so that redirection and capture work."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the record, unless the script's own logging also prints it (logging.basicConfig)."""
        on_screen = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        root = logging.getLogger()
        if not any(getattr(handler, "stream", None) in on_screen for handler in root.handlers):
            super().emit(record)


def get_logger(name: str) -> logging.Logger:
    """A logger below "shardkit", set up on first use: INFO and above, to stderr."""
    root = logging.getLogger("shardkit")
    if not root.handlers:
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter("shardkit: %(message)s"))
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    found = logging.getLogger(name)
    if not any(isinstance(one, _RankFilter) for one in found.filters):
        found.addFilter(_RankFilter())
    return found
