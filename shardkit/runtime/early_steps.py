"""Detects optimizer steps before the last micro-batch of a window, in loops without `accumulate()`: their losses are
divided by micro-batches that they do not have."""

from collections.abc import Sequence

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime.accumulate import Accumulation

log = get_logger(__name__)


class EarlySteps:
    """The check of one run. `keeps_batch`: the micro-batches of a window make up for absent machines of an elastic
    run."""

    def __init__(
        self, accumulation: Accumulation, loaders: Sequence[PreparedLoader], keeps_batch: bool, is_main: bool
    ) -> None:
        self._accumulation, self._loaders = accumulation, loaders
        self._keeps_batch, self._is_main = keeps_batch, is_main
        self._has_warned = False

    def check(self) -> None:
        """Warns, once, of a step after fewer backwards than micro-batches. Raises UsageError where they would keep the
        global batch of an elastic run. At the end of a loader a window may be short."""
        backwards, steps = self._accumulation.backwards_outside_windows, self._accumulation.steps
        loader = active_loader(self._loaders)
        if self._has_warned or not 0 < backwards < steps or loader is None or loader.end_of_loader:
            return
        what = f"(got an optimizer step after {backwards} of {steps} micro-batches, outside of accumulate())"
        if self._keeps_batch:
            raise UsageError(
                f"elastic: the global batch of all machines is not kept {what}; put forward, backward and step into "
                "`with accelerator.accumulate(model):`, or give batches of all ranks: Accelerator(split_batches=True)."
            )
        self._has_warned = True
        if self._is_main:
            log.warning(
                f"accumulate: gradient_accumulation_steps only divides losses {what}; put forward, backward and step "
                "into `with accelerator.accumulate(model):`."
            )
