"""Rank-aware logging. One line a message; every rank's warnings and errors, only rank 0's information."""

import logging
import sys

from shardkit import env


class _RankFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        ranks = env.ranks()
        return ranks is None or ranks.rank == 0 or record.levelno >= logging.WARNING


class _CurrentStderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is at the time, so that redirection and capture work."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr


def get_logger(name: str) -> logging.Logger:
    """A logger below "shardkit", set up on first use: INFO and up, to stderr, without propagation twice."""
    root = logging.getLogger("shardkit")
    if not root.handlers:
        handler = _CurrentStderr()
        handler.setFormatter(logging.Formatter("shardkit: %(message)s"))
        handler.addFilter(_RankFilter())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
    return logging.getLogger(name)
