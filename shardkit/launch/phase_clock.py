"""A rank's seconds by kind of work, from the phases that it posts.

It is the time of the rank's main thread: on a device whose work is queued, "data" may pass while the device still
computes. Torch-free, so that a rank can count from its start.
"""

from collections.abc import Sequence

KINDS = ("start", "load", "data", "first step", "steps", "evaluation", "save", "other")
"""start: up to the first batch, with imports and the making of the model; data: waiting for a batch; first step: all
work of steps before the first has ended, with compilation; evaluation: forwards without a backward; other: between
loops, in `accelerator.pause()`."""

_START, _LOAD, _DATA, _FIRST, _STEPS, _EVALUATION, _SAVE, _OTHER = range(len(KINDS))

_OF_PHASE = {
    "starting": _START,
    "load": _LOAD,
    "data": _DATA,
    "forward": _STEPS,
    "backward": _STEPS,
    "optimizer step": _STEPS,
    "after optimizer step": _STEPS,
    "save": _SAVE,
}


class PhaseClock:
    """Counts from its making on, in phase "starting"."""

    def __init__(self, now_s: float) -> None:
        self.spent = [0.0] * len(KINDS)
        """Seconds by kind up to the present phase's beginning."""
        self.kept = tuple(self.spent)
        """As `spent`, when the save of the newest complete checkpoint began."""
        self._phase, self._since_s = "starting", now_s
        self._forward_s = 0.0
        """Seconds in forwards since the last batch, counted as a step's: an evaluation's, if no backward follows."""
        self._step_kind = _FIRST
        self._at_save: dict[int, tuple[float, ...]] = {}

    def enter(self, phase: str, step: int, now_s: float) -> None:
        """The present phase ends, and another begins."""
        seconds, kind = now_s - self._since_s, _OF_PHASE.get(self._phase, _OTHER)
        self.spent[self._step_kind if kind == _STEPS else kind] += seconds
        if self._phase == "forward":
            self._forward_s += seconds
        if phase == "data":
            self.spent[self._step_kind] -= self._forward_s
            self.spent[_EVALUATION] += self._forward_s
        elif phase == "after optimizer step":
            self._step_kind = _STEPS
        elif phase == "save" != self._phase:
            self._at_save[step] = tuple(self.spent)
        if phase != "forward":
            self._forward_s = 0.0
        self._phase, self._since_s = phase, now_s

    def committed(self, step: int) -> None:
        """The checkpoint of this step is complete."""
        self.kept = self._at_save.pop(step, tuple(self.spent))


def until(spent: Sequence[float], phase: str, seconds: float) -> dict[str, float]:
    """Seconds by kind where the present phase has lasted for `seconds`."""
    found, kind = list(spent), _OF_PHASE.get(phase, _OTHER)
    found[_FIRST if kind == _STEPS and not found[_STEPS] else kind] += seconds
    return dict(zip(KINDS, found, strict=True))
