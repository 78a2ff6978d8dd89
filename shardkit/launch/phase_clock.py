"""A rank's seconds by kind of work, from the phases that it posts.

It is the time of the rank's main thread: on a device whose work is queued, "data" may pass while the device still
computes. Torch-free, so that a rank can count from its start.
"""

KINDS = ("start", "load", "data", "first step", "steps", "evaluation", "save", "other")
"""start: up to the first batch, with imports and the making of the model; data: waiting for a batch; first step: all
work of steps before the first has ended, with compilation; evaluation: forwards without a backward; other: between
loops, in `accelerator.pause()`."""

_OF_PHASE = {
    "starting": "start",
    "load": "load",
    "data": "data",
    "forward": "steps",
    "backward": "steps",
    "optimizer step": "steps",
    "after optimizer step": "steps",
    "save": "save",
}


class PhaseClock:
    """Counts from its making on, in phase "starting"."""

    def __init__(self, now_s: float) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._phase, self._since_s = "starting", now_s
        self._forward_s = 0.0
        """Seconds in forwards since the last batch: of a step, unless the next batch comes without a backward."""
        self._has_stepped = False
        self._at_save: dict[int, tuple[float, ...]] = {}
        self.kept: tuple[float, ...] = (0.0,) * len(KINDS)
        """As `spent`, when the save of the newest complete checkpoint began."""

    @property
    def spent(self) -> tuple[float, ...]:
        """Seconds by kind up to the present phase's beginning."""
        seconds = dict(self._seconds)
        seconds[self._kind_of_step] += self._forward_s
        return tuple(seconds.values())

    def enter(self, phase: str, step: int, now_s: float) -> None:
        """The present phase ends, and another begins."""
        kind, seconds = _OF_PHASE.get(self._phase, "other"), now_s - self._since_s
        if self._phase == "forward":
            self._forward_s += seconds
        else:
            self._seconds[self._kind_of_step if kind == "steps" else kind] += seconds
        if phase != "forward":
            self._seconds["evaluation" if phase == "data" else self._kind_of_step] += self._forward_s
            self._forward_s = 0.0
        self._has_stepped |= phase == "after optimizer step"
        if phase == "save" != self._phase:
            self._at_save[step] = self.spent
        self._phase, self._since_s = phase, now_s

    def committed(self, step: int) -> None:
        """The checkpoint of this step is complete."""
        self.kept = self._at_save.pop(step, self.spent)

    @property
    def _kind_of_step(self) -> str:
        return "steps" if self._has_stepped else "first step"


def until(spent: tuple[float, ...], phase: str, seconds: float) -> dict[str, float]:
    """Seconds by kind where the present phase has lasted for `seconds`."""
    found = dict(zip(KINDS, spent, strict=True))
    kind = _OF_PHASE.get(phase, "other")
    found["first step" if kind == "steps" and not found["steps"] else kind] += seconds
    return found
