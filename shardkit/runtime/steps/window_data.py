"""The batches of an accumulation window: whose end ends it, which ones a resumed run reads again, with which random
numbers."""

import math
from collections.abc import Iterable

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.data.loop import Loop
from shardkit.data.sampler import length_of
from shardkit.distributed import random_state, xla


class WindowData:
    """What the loaders have given to the current window. `loaders`: all prepared ones."""

    def __init__(self, loaders: list[PreparedLoader]) -> None:
        self._loaders = loaders
        self._of_micro_batch: list[PreparedLoader] = []
        """Those that have given a batch for the last micro-batch."""
        self._newest_batch = 0
        """`last_yield` of the newest batch that the last micro-batch had."""
        self._loop: Loop | None = None
        """The loop over a loader whose end ends the window."""
        self._random_states: random_state.States | None = None
        """From before the first batch that no step has used."""

    def begin_micro_batch(self, most: int) -> PreparedLoader | None:
        """The loader whose end ends the window: of several that have yielded a batch for this micro-batch the longest,
        since a shorter one begins again in the same loop. `most`: micro-batches of a window."""
        active = active_loader(self._loaders)
        new = [one for one in self._loaders if one.is_iterating and one.last_yield > self._newest_batch]
        self._newest_batch, self._of_micro_batch = 0 if active is None else active.last_yield, new
        loader = active if len(new) < 2 else max(new, key=lambda one: (_length(one), one.last_yield))
        ended = (one.ended for one in self._loaders if one.ended is not None)
        self._loop = (
            loader.newest_loop
            if loader is not None
            else next((loop for loop in ended if loop.was_read_ahead(most)), None)
        )
        if self._loop is not None:
            self._loop.begin_micro_batch()
        return loader

    @property
    def ends_window(self) -> bool:
        """Whether the loop that gave the present micro-batch ends the window with it."""
        return self._loop is not None and self._loop.ends_micro_batches

    def keep_open(self) -> None:
        """The window goes on after this micro-batch, maybe in the loaders' next loops."""
        for loader in self._of_micro_batch:
            loader.note_window(is_open=True)

    def end(self) -> None:
        """The window is over: a step has used its batches, or was left out."""
        for loader in self._loaders:
            loader.note_window(is_open=False)

    def keep_random_states(self, loaders: Iterable[PreparedLoader]) -> None:
        """Keeps the present ones, before a batch is read, unless these loaders have given batches that are to be read
        again. (Of PyTorch/XLA a save has the state of its moment.)"""
        if not (xla.is_started() or any(loader.may_have_unused_batches for loader in loaders)):
            self._random_states = random_state.take()

    def random_states(self) -> random_state.States | None:
        """The random states for a save: where a resumed run reads batches again, those from before the first of them,
        so that it draws the same numbers for them; else None, for the present ones."""
        return self._random_states if any(loader.has_unused_batches for loader in self._loaders) else None


def _length(loader: PreparedLoader) -> float:
    """The batches of an epoch; infinite where they are unknown."""
    found = length_of(loader)
    return math.inf if found is None else found
