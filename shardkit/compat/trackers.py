"""`accelerate.tracking`: the base class for trackers of a script, and the installed trackers."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from shardkit.compat.kinds import LoggerType
from shardkit.compat.states import PartialState
from shardkit.tracking import trackers
from shardkit.tracking.tracker import Tracker


class GeneralTracker(Tracker):
    """The base class for trackers of a script, which define `name`, `requires_logging_directory`, and the methods
    `store_init_configuration`, `log` and `finish`."""

    main_process_only = True
    requires_logging_directory = False
    takes_objects = True


def get_available_trackers() -> list[LoggerType]:
    """The installed trackers, by Accelerate's names."""
    return [LoggerType(name) for name in trackers.KNOWN if name in LoggerType.list() and trackers.is_installed(name)]


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a tracker's method run only on rank 0 if the tracker has `main_process_only`."""

    @wraps(function)
    def called(self: Any, *args: Any, **arguments: Any) -> Any:
        if getattr(self, "main_process_only", True) and not PartialState().is_main_process:
            return None
        return function(self, *args, **arguments)

    return called
