"""Detects optimizer steps before the last micro-batch of a window, in loops without `accumulate()`: their losses are
divided by micro-batches that they do not have. In an elastic run these loops would end with the first lost machine."""

from collections.abc import Sequence

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime.steps.accumulate import Accumulation

log = get_logger(__name__)

_KEEP_IT = (
    "put forward, backward and step into `with accelerator.accumulate(model):`, or give batches of all ranks: "
    "Accelerator(split_batches=True)"
)


class EarlySteps:
    """The check of one run. `keeps_batch`: the micro-batches of a window make up for absent machines of an elastic
    run; `may_keep_it`: they will where machines are lost."""

    def __init__(
        self,
        accumulation: Accumulation,
        loaders: Sequence[PreparedLoader],
        keeps_batch: bool,
        may_keep_it: bool,
        is_main: bool,
    ) -> None:
        self._accumulation, self._loaders = accumulation, loaders
        self._keeps_batch, self._may_keep_it, self._is_main = keeps_batch, may_keep_it, is_main
        self._has_warned = False

    def check(self) -> None:
        """Warns, once, of a step after fewer backwards than micro-batches. Raises UsageError where they would keep the
        global batch of an elastic run. At the end of a loader a window may be short."""
        backwards, steps = self._accumulation.backwards_outside_windows, self._accumulation.steps
        loader = active_loader(self._loaders)
        if self._has_warned or not backwards or loader is None or loader.end_of_dataloader:
            return
        what = f"(got an optimizer step after {backwards} of {steps} micro-batches, outside of accumulate())"
        if backwards < steps and self._keeps_batch:
            raise UsageError(f"elastic: the global batch of all machines is not kept {what}; {_KEEP_IT}.")
        if backwards < steps:
            self._warn(
                f"accumulate: gradient_accumulation_steps only divides losses {what}; put forward, backward and step "
                "into `with accelerator.accumulate(model):`."
            )
        elif self._may_keep_it:
            self._warn(
                f"elastic: the global batch would not be kept where machines are lost, and the run would end {what}; "
                f"{_KEEP_IT}. A loop that counts accelerator.gradient_accumulation_steps itself goes on."
            )

    def _warn(self, text: str) -> None:
        self._has_warned = True
        if self._is_main:
            log.warning(text)
