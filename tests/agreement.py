"""Comparisons in the background many times a second, for functions on ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardkit.distributed import background_agreement

SHORT_TIMES_S = {"POLL_S": 0.02, "POLL_SOON_S": 0.005, "COMPARE_EVERY_S": 0.05}


@contextmanager
def compared_often() -> Iterator[None]:
    """Inside the block a rank looks and compares within some ms."""
    usual = {name: getattr(background_agreement, name) for name in SHORT_TIMES_S}
    try:
        for name, seconds in SHORT_TIMES_S.items():
            setattr(background_agreement, name, seconds)
        yield
    finally:
        for name, seconds in usual.items():
            setattr(background_agreement, name, seconds)
