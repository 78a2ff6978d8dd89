"""Finds where one optimizer step ends and the next begins, from what the loop calls. For what happens there, see
`step_boundary.py`."""

from shardkit.data.loader import PreparedLoader
from shardkit.runtime.steps.step_events import StepEvents


class Boundaries:
    """The step boundaries of a run.

    One follows each training step: where the loop requests its next batch, or without a loader at its next micro-batch
    or backward. One follows a batch of another loop (an evaluation) in which all ranks ran a collective and no window
    is open. (A loop that rank 0 runs alone must not wait for the others.)
    """

    def __init__(self, events: StepEvents) -> None:
        self._events = events
        self._is_due = False
        self._loader: PreparedLoader | None = None
        """The loader in whose loop the last step was."""
        self._have_ranks_met = False
        self._backwards_by_hand = 0

    def note_step(self, loader: PreparedLoader | None, is_repeated: bool) -> None:
        """Notes a step in the loop of that loader. `is_repeated`: the optimizer has already stepped since the last
        counted step."""
        if self._is_due and self._loader is None and is_repeated:
            self._events.on_missed_boundary()
        self._is_due, self._loader = True, loader

    @property
    def place(self) -> tuple[int, int]:
        """Epoch, and batch in it, of the loader in whose loop the last step was; (0, 0) without a loader."""
        if self._loader is None:
            return 0, 0
        loop = self._loader.newest_loop
        return self._loader.epoch, 0 if loop is None else loop.yielded

    def note_meeting(self) -> None:
        """Notes that all ranks have just run a collective, so they process this batch together."""
        self._have_ranks_met = True

    def before_batch(self) -> None:
        """Called before a micro-batch or a backward of a loop, with or without a loader."""
        if self._is_due and self._loader is None:
            self._pass()

    def after_batch(self, loader: PreparedLoader, is_window_open: bool, backwards_by_hand: int) -> None:
        """Called where a loop requests its next batch. `backwards_by_hand`: backwards so far, where the loop updates
        the weights itself, without a known optimizer; else 0."""
        met, self._have_ranks_met = self._have_ranks_met, False
        if self._is_due and loader is self._loader:
            self._pass()
        elif met and loader is not self._loader and not is_window_open:
            self._events.at_boundary()
        elif backwards_by_hand > self._backwards_by_hand:
            self._backwards_by_hand = backwards_by_hand
            self._events.at_boundary()

    def _pass(self) -> None:
        self._is_due = False
        self._events.at_boundary()
