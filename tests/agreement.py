"""Comparisons in the background many times a second, for functions on ranks."""

from typing import Any
from unittest.mock import patch

from shardkit.distributed import background_agreement

SHORT_TIMES_S = {"POLL_S": 0.02, "POLL_SOON_S": 0.005, "COMPARE_EVERY_S": 0.05}


def compared_often() -> Any:
    """A context in which a rank looks and compares within some ms."""
    return patch.multiple(background_agreement, **SHORT_TIMES_S)
