"""Detects ranks that use different modules or parameters in a step: FSDP would mix their gradients."""

from collections.abc import Sequence

from torch import nn

from shardkit.distributed.control import ControlGroup, unlike_rank_0
from shardkit.errors import ModelError
from shardkit.sharding.ddp.replica import Replica
from shardkit.sharding.fsdp.trace import different_modules, trace_of

# This many steps are checked before the optimizer steps, and most of what they do before it happens
# (`sharding/fsdp/trace.py`); later ones are compared in the background (`distributed/background_agreement.py`).
CHECKED_STEPS = 2


class SameModules:
    """The check of one run, over the growing list of its models."""

    def __init__(self, models: Sequence[nn.Module], control: ControlGroup, is_always: bool) -> None:
        self._models, self._control = models, control
        self._left = CHECKED_STEPS
        self._is_always = is_always

    def trace(self) -> int:
        """A hash of the order in which the models' units have run since the start."""
        traces = [trace.value for trace in map(trace_of, self._models) if trace is not None]
        return hash(tuple(traces)) if traces else 0

    def check(self) -> None:
        """Checks before an optimizer steps; ModelError on all ranks. Collective in the first steps, and under
        `debug`."""
        for model in self._models:
            if isinstance(model, Replica):
                model.before_step()
        if self._left or self._is_always:
            self._left = max(0, self._left - 1)
            different = self._control.decide(self.trace(), unlike_rank_0)
            if different:
                raise ModelError(different_modules(different, "the weights have not been changed by this step"))

    def check_before_save(self) -> None:
        """ModelError on all ranks where any step so far differed: the weights are not worth a save, and a short run may
        end before they are compared in the background. Collective."""
        trace = self.trace()
        different = self._control.decide(trace, unlike_rank_0) if trace else []
        if different:
            raise noticed_late(different)


def noticed_late(different: list[int]) -> ModelError:
    """The error for a difference that was found in the background."""
    return ModelError(different_modules(different, "weights are wrong since then, so go back to an earlier checkpoint"))
