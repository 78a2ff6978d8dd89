"""Refuses loops that count micro-batches themselves, and step after `accumulate()`, where windows end at other places:
these steps would be left out, and later ones would have the gradients of several windows."""

from shardkit.errors import UsageError
from shardkit.runtime.steps.accumulate import Accumulation


class StepsAndWindows:
    """The check of one run."""

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._has_stepped = False
        self._micro_batches = self._full_windows = 0
        """Those until the last call of `step`."""
        self._asks_in_each = False
        """Whether the loop calls `step` in each micro-batch, so that the windows select the steps."""

    def check(self) -> None:
        """Called with each call of `step`. Raises UsageError where it comes after several micro-batches, outside of
        `accumulate()`, in an open window, and the window before had no step."""
        now = self._accumulation
        since = now.micro_batches - self._micro_batches
        if not since:
            return
        self._asks_in_each = self._asks_in_each or since == 1
        has_missed_end = now.is_gathering() and now.full_windows > self._full_windows
        if has_missed_end and self._has_stepped and not (self._asks_in_each or now.is_inside):
            raise UsageError(
                "optimizer step: it would be left out, since the loop's steps and the windows of accumulate() do not "
                f"end together (got a step after {since} micro-batches, with micro-batch {now.counters.micro_step} of "
                f"{now.micro_batches_of_window} of a window); call step() inside of accumulate(), in each micro-batch; "
                "or make gradient_accumulation_steps the number that the loop counts, and set "
                "shardkit.end_window_with_data: false where its windows go on after the end of a loader."
            )
        self._has_stepped = True
        self._micro_batches, self._full_windows = now.micro_batches, now.full_windows
