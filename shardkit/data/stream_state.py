"""The own state of a stream's dataset, and which of several loops over it has read last."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from shardkit.data import hugging_face
from shardkit.signatures import signature


@dataclass(eq=False)
class Reading:
    """What one loop reads of a dataset."""

    outer: "Reading | None"
    """The loop that it was begun inside."""
    state: Any = None
    """The dataset's own state after what the loop has read."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The dataset's attributes then, before a loop inside this one began."""
    is_open: bool = True
    """Whether it is yet to read: a loop is given its last batch afterwards."""
    was_left: bool = False
    """Whether the dataset may have more for it."""


class OwnState:
    """What a dataset tells of its position by `state_dict()`, if it does.

    A dataset has one state, but loops over it may be nested: each gets back its own when it reads again.
    """

    def __init__(self, dataset: Any) -> None:
        self.is_kept = _is_kept(dataset)
        self._dataset = dataset
        self._at_start: tuple[Any] | None = None
        """Before the first item of an epoch; None before it was asked for."""
        self._newest: Reading | None = None
        """What has read last."""

    def begin(self, saved: Any, is_moved: bool, is_inside: bool, is_worker: bool) -> Reading:
        """A new reading, from the saved state. Without one it goes on where the dataset is; if `is_moved`, and in a
        worker, which keeps what an epoch has left there, from the dataset's beginning."""
        before, outer = self._newest, self._outer() if is_inside else None
        self._newest = reading = Reading(outer)
        if not self.is_kept:
            return reading
        if outer is not None and outer is before:
            self.note(outer)
            outer.attributes = dict(vars(self._dataset))
        if self._at_start is None:
            # Hugging Face's state is that of its newest iteration, maybe in an earlier run; None begins anew.
            is_beginning_none = hugging_face.is_stream(self._dataset)
            self._at_start = (None if is_beginning_none else deepcopy(self._dataset.state_dict()),)
        elif saved is None and (is_moved or (is_worker and before is not None and before.was_left)):
            self._load(self._at_start[0])
        if saved is not None:
            self._load(saved)
        return reading

    def _outer(self) -> Reading | None:
        """What a reading that begins now is inside of."""
        newest = self._newest
        return newest if newest is None or newest.is_open or newest.outer is None else newest.outer

    def note(self, reading: Reading) -> None:
        """Stores the state after what was just read."""
        reading.state = deepcopy(self._dataset.state_dict())  # a dataset may return the dict that it later changes

    def is_elsewhere(self, reading: Reading) -> bool:
        """Whether another loop has read since, so that the dataset is to be put back."""
        return self.is_kept and reading.was_left and self._newest is not reading

    def put_back(self, reading: Reading) -> None:
        """The next iterator of the dataset goes on with this reading."""
        self._newest = reading
        self._load(reading.state)

    def end(self, reading: Reading) -> None:
        """The dataset is as the loop has left it, also if one inside it that was left was the last to read."""
        reading.is_open = False
        newest = self._newest
        if newest is None or newest.is_open or not newest.was_left:
            return
        if newest.outer is reading or (newest is reading and newest.outer is not None and not newest.outer.is_open):
            self._leave_as(newest.outer)

    def _leave_as(self, reading: Reading) -> None:
        self._newest = reading
        if not self.is_kept or hugging_face.is_stream(self._dataset):  # which begins every loop anew
            return
        vars(self._dataset).update(reading.attributes)
        if not _are_equal(self._dataset.state_dict(), reading.state):  # of an open file, say
            self._load(reading.state)

    def _load(self, state: Any) -> None:
        self._dataset.load_state_dict(deepcopy(state))  # it may change the dict, which is still the position


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors and arrays have no truth value
        return False


def _is_kept(dataset: Any) -> bool:
    """Whether the dataset's state_dict() and load_state_dict() cover its whole position, and need no arguments."""
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    needed = [one for one in signature(dataset.state_dict).parameters.values() if one.default is one.empty]
    takes_nothing = all(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in needed)
    return takes_nothing and not hugging_face.loses_samples(dataset)
