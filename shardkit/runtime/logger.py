"""Logging of the script, on one rank or on all: `shardkit.get_logger`."""

import logging
from collections.abc import MutableMapping
from functools import cache
from typing import Any

import torch.distributed as dist

from shardkit.distributed.collectives import wait_for_everyone
from shardkit.distributed.process import launched
from shardkit.errors import UsageError


class RankLogger(logging.LoggerAdapter):
    """A logger whose calls take two more arguments: `main_process_only` (by default True: rank 0 alone) and `in_order`
    (every rank, one after the other; collective, every rank must make the call)."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Logs if this rank is selected."""
        is_for_one, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 2  # this method and `_write`: the line is the script's
        ranks = launched()
        if in_order and dist.is_initialized():
            for rank in range(ranks.world_size):
                if rank == ranks.rank:
                    self._write(level, msg, args, kwargs)
                wait_for_everyone()
        elif in_order or not is_for_one or ranks.rank == 0:
            self._write(level, msg, args, kwargs)

    def _write(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.isEnabledFor(level):
            text, settings = self.process(msg, kwargs)
            self.logger.log(level, text, *args, **settings)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds nothing."""
        return msg, kwargs

    @cache  # noqa: B019  a logger lives as long as the process
    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Logs this warning once per process, for each set of arguments, which must be hashable."""
        # Not by warning(): Python 3.10 counts that method of logging, too.
        self.log(logging.WARNING, msg, *args, **{"stacklevel": 2, **kwargs})


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """A logger of that name whose calls take `main_process_only` (default True: rank 0 alone) and `in_order` (every
    rank, one after the other). `log_level` is also set for the root logger. Raises UsageError where it is unknown."""
    logger = logging.getLogger(name)
    if log_level is not None:
        try:
            logger.setLevel(log_level.upper() if isinstance(log_level, str) else log_level)
            logger.root.setLevel(logger.level)
        except ValueError:
            raise UsageError(
                f"get_logger: unknown level (got {log_level!r}); use DEBUG, INFO, WARNING or ERROR."
            ) from None
    return RankLogger(logger, {})
