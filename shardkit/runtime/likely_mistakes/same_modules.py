"""Detects ranks that use different modules or parameters in a step: FSDP would mix their gradients."""

from collections.abc import Sequence

from torch import nn

from shardkit.distributed.control import ControlGroup, unlike_rank_0
from shardkit.errors import ModelError
from shardkit.sharding.ddp import Replica
from shardkit.sharding.fsdp.trace import trace_of
from shardkit.wording import ranks_text

# This many steps are checked before the optimizer steps; later ones are compared in the background
# (`distributed/background_agreement.py`).
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
                raise ModelError(text(different, "the weights have not been changed by this step"))

    def check_before_save(self) -> None:
        """ModelError on all ranks where any step so far differed: the weights are not worth a save, and a short run may
        end before they are compared in the background. Collective."""
        trace = self.trace()
        different = self._control.decide(trace, unlike_rank_0) if trace else []
        if different:
            raise noticed_late(different)


def noticed_late(different: list[int]) -> ModelError:
    """The error for a difference that was found in the background."""
    return ModelError(text(different, "weights are wrong since then, so go back to an earlier checkpoint"))


def text(different: list[int], consequence: str) -> str:
    """The error text for ranks that have used other modules than rank 0."""
    return (
        f"model: {ranks_text(different)} used other modules or parameters than rank 0 in a step, and FSDP mixes their "
        f"gradients; {consequence}. Use the same on all ranks. Where one may leave out parameters of a unit, set "
        "shardkit.ddp_find_unused_parameters: true; where it may leave out units (experts), make one of them, too: "
        "name the class around them in fsdp_transformer_layer_cls_to_wrap, with fsdp_auto_wrap_policy: "
        "TRANSFORMER_BASED_WRAP, or set NO_WRAP."
    )
