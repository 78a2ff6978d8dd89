"""A progress bar for runs with several ranks."""

from typing import Any

from shardkit import env
from shardkit.errors import UsageError


def tqdm(*arguments: Any, main_process_only: bool = True, **settings: Any) -> Any:
    """A tqdm bar on each machine's first rank only; with `main_process_only` False on every rank.

    Raises UsageError where tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm as bar
    except ImportError:
        raise UsageError("tqdm: is not installed (got no package tqdm); pip install tqdm.") from None
    ranks = env.ranks()
    if main_process_only and ranks is not None and ranks.local_rank != 0:
        settings["disable"] = True
    return bar(*arguments, **settings)
