"""Prepared data loaders: one order for all ranks, a position that survives restarts, a flag on the last batch."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch.utils.data import DataLoader

from shardkit.data.device import to_device
from shardkit.data.loop import Batches, Call, Loop
from shardkit.data.position import EPOCH_IS_OVER, Position, facts_of, inside_loop, misfit, saved_position, stored_state
from shardkit.data.sources import Source, batch_sampler_of, batch_size_of
from shardkit.errors import CheckpointError, UsageError
from shardkit.log import get_logger
from shardkit.signatures import signature

log = get_logger(__name__)

Purpose = Literal["training", "evaluation"]
_ARGUMENTS = frozenset(signature(DataLoader).parameters)  # of the user's DataLoader; `prepare` has read them


class PreparedLoader:
    """A data loader that yields this rank's batches, on its device, and knows its position.

    Iterating runs one epoch, or the rest of one after `load_state_dict` or `skip_first_batches`. An epoch that is left
    with `break` is over: the next iteration starts the next one, as with any DataLoader. A nested loop over the same
    loader runs its own epoch and does not move the outer one. A loop over a training loader without a backward or a
    step, or a look at one batch before the first step of all, does not count: the next one starts where it did.
    """

    def __init__(
        self, source: Source, user_loader: DataLoader, rank: int, device: torch.device | None, seed: int
    ) -> None:
        self.after_batch: Call | None = None
        """Called when the loop requests the next batch: the previous batch is done."""
        self.before_loop: Call | None = None
        """Called when a loop begins."""
        self.ended: Loop | None = None
        """The loop that was the last to end."""
        self._source = source
        self._rank, self._device, self._seed = rank, device, seed
        self._loop: Loop | None = None
        self._next = self._used = Position()  # where the next loop begins; where a resumed run does
        # Of `_next`: whether a loop begins just there, also inside an epoch; if a load set it; batches left out.
        self._is_positioned, self._is_restored, self._skipped = False, False, 0
        self._has_looked = self._is_in_window = False  # if the last loop was a look; if an open window has its batches
        self._reads_rest: ReferenceType[Batches] | None = None
        """The first iterator after a load."""
        self._purpose: Purpose | None = None
        self._passes_finished_epoch = self._is_surely_trained = False  # the latter: its purpose stays training
        self._facts = partial(facts_of, source.dataset, source.split, source.sampler)
        self._user_loader = user_loader  # from now on attributes that are not the prepared loader's own are its

    def __iter__(self) -> Iterator[Any]:
        batches = Batches(self._batches())
        self._reads_rest = self._reads_rest or ref(batches)
        return batches

    def _batches(self) -> Generator[Any, None, None]:
        if self.before_loop is not None and (before_loop := self.before_loop()) is not None:
            before_loop(self)
        is_moved, is_inside = self._is_positioned, self._loop is not None
        loop = self._loop = self._begin()
        try:
            for piece in self._source.pieces(self._seed, loop.position, is_moved, is_inside):
                loop.take(piece)
                self._loop = loop  # loops over one loader may alternate
                yield loop.given(to_device(piece.batch, self._device))
                if self.after_batch is not None and (after_batch := self.after_batch()) is not None:
                    after_batch(self)
            loop.refuse_early_end()
            loop.finish()
        finally:
            self._end(loop)

    def _begin(self) -> Loop:
        """A loop from the current position."""
        outer, start, self._has_looked = self._loop, self._next, False
        left_out, start_is = 0, (self._is_restored, self._skipped)
        if self._is_positioned:
            left_out = start.samples // self.total_batch_size if self._is_restored else 0
            if start.may_be_over and (self._passes_finished_epoch or not (self._reads_rest and self._reads_rest())):
                start = Position(start.epoch + 1)
            elif self._is_restored and self._is_over(start):
                start = self._after(start)
            self._is_positioned = self._is_restored = self._passes_finished_epoch = False
            self._skipped = 0
        elif outer is not None:
            outer.inner += 1
            start = Position(outer.position.epoch + outer.inner)
        elif start.samples:  # the last loop was left inside this epoch
            start = Position(start.epoch + 1)
        if outer is not None and outer.has_inner_ended and self._purpose != "training":
            outer = None  # an iterator that the script keeps but does not read: other loops finish between its batches
        if outer is None:
            self._next = start
            self._set_used(start)
        return Loop(start, outer, restored_batches=left_out, start=start, start_is=start_is)

    def _is_over(self, position: Position) -> bool:
        """Whether the position's epoch has no batches left."""
        return position.dataset == EPOCH_IS_OVER or self._source.is_over(self._seed, position)

    def _after(self, position: Position) -> Position:
        """Where to start from a restored position whose epoch is over."""
        if self._passes_finished_epoch:
            return Position(position.epoch + 1)
        if self._rank == 0:
            log.info(position.at_an_end)
        return position

    def _end(self, loop: Loop) -> None:
        """The loop finished or was left. A nested one without an optimizer step restores the outer one."""
        loop.close()
        outer, self.ended = loop.outer, loop
        if loop.has_wasted_rest and self._purpose == "training" and self._rank == 0:
            log.warning(loop.wasted_rest)
        if self._loop is not loop:
            return
        if outer is not None and outer.is_open and not loop.steps:
            self._loop, outer.has_inner_ended = outer, loop.is_finished
            return
        self._loop = None
        if not self._is_positioned and loop.position.epoch >= self._next.epoch:
            if self._purpose != "evaluation" and loop.was_a_look(self._purpose == "training"):
                self._next, (self._is_restored, self._skipped) = loop.start, loop.start_is
                self._is_positioned = self._has_looked = True  # a stream is brought back to it
                return
            self._next, self._is_positioned = loop.position, loop.has_failed
        if loop.is_finished:
            self._set_used(self._next)

    def _set_used(self, position: Position) -> None:
        """Where to resume from; an open window's batches are read again, also if it began in a loop before this one."""
        if not self._is_in_window:
            self._used = position

    @property
    def _now(self) -> Position:
        return self._next if self._loop is None else self._loop.position

    @property
    def is_iterating(self) -> bool:
        return self._loop is not None

    @property
    def last_yield(self) -> int:
        """A number that grows with every batch of any loader; 0 outside of loops."""
        return 0 if self._loop is None else self._loop.last_yield

    @property
    def newest_loop(self) -> Loop | None:
        """The loop over it; after that, the one that was the last to end."""
        return self._loop or self.ended

    @property
    def began(self) -> int:
        """The value of `last_yield`'s counter when the loop began."""
        return 0 if self._loop is None else self._loop.began

    def take_trained(self, micro_batches: int) -> int | None:
        """As `Loop.take_trained`; None outside of loops."""
        return None if self._loop is None else self._loop.take_trained(micro_batches)

    def note_backward(self, is_in_loop: bool = False) -> None:
        """Notes a backward: of the current batch, or of one that the script has kept from the loop before; where it
        `is_in_loop` over another loader, only of a single batch that the script still holds."""
        if self._loop is not None:
            self._loop.is_trained_on = True
        elif self._has_looked and self.ended is not None and (not is_in_loop or self.ended.is_one_held):
            self._move_to(self.ended.position)
            self._is_positioned = False

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of the epoch, which ends a window; a script may set it for a batch."""
        return self._loop is not None and self._loop.ends_window

    @end_of_dataloader.setter
    def end_of_dataloader(self, is_end: bool) -> None:
        if self._loop is not None:
            self._loop.ends_window = is_end

    @property
    def remainder(self) -> int:
        """Real samples in the current global batch if it is padded, else -1."""
        return -1 if self._loop is None else self._loop.remainder

    @property
    def epoch(self) -> int:
        """The current epoch; between loops, the next one."""
        return self._now.epoch

    @property
    def iteration(self) -> int:
        """Accelerate's name of the epoch; setting it is `set_epoch`."""
        return self.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self.set_epoch(epoch)

    @property
    def samples_seen(self) -> int:
        """Samples of this epoch yielded so far, over all ranks."""
        return self._now.samples

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return len(self._source)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for `isinstance(loader, DataLoader)`
        return type(self._user_loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._user_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS:
            raise UsageError(
                f"data: {name} of a prepared loader cannot be changed; set it on the DataLoader before prepare."
            )
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        if is_own or "_user_loader" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._user_loader, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is in no loop."""
        return object.__new__, (PreparedLoader,), {**vars(self), "_loop": None, "ended": None, "_reads_rest": None}

    @property
    def batch_size(self) -> int | None:
        """Samples in this rank's batches; None where the dataset or a custom batch sampler forms the batches."""
        size = batch_size_of(self._user_loader)
        return None if size is None else self._source.layout.global_batch // self._source.layout.world_size

    @property
    def has_ready_batches(self) -> bool:
        """Whether the dataset forms the batches: samples are then counted in batches."""
        return self._user_loader.batch_size is None and batch_sampler_of(self._user_loader) is None

    @property
    def batches_source(self) -> Source:
        """Where its batches come from."""
        return self._source

    @property
    def total_batch_size(self) -> int:
        """Samples in a global batch, over all ranks."""
        return self._source.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all ranks."""
        return len(self._source.dataset)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration runs this epoch. A restored position in it is kept, and so are batches to skip. A
        map-style dataset and a loader with a `set_epoch` are told now; streams and samplers when the epoch begins."""
        for told in (self._user_loader, *([] if self._source.sampler is None else [self._source.dataset])):
            if hasattr(told, "set_epoch"):
                told.set_epoch(epoch)
        if self._is_positioned and epoch == self._next.epoch:
            self._passes_finished_epoch = False
            return
        has_position = self._is_restored and (self._next.samples or self._purpose == "training")
        is_next = epoch == self._next.epoch + 1 and (self._next.may_be_over or self._is_over(self._next))
        if has_position and not is_next and self._rank == 0:
            log.warning(self._next.dropped_by(epoch))
        self._skip(Position(epoch), self._skipped)

    def skip_to(self, batches: int) -> None:
        """The next iteration starts after this many batches of the epoch, regardless of the position in it.
        If the restored epoch is over, fewer batches than it has are those of the next epoch, since a script that counts
        its steps is in the next one."""
        start = Position(self.epoch, order=self._now.order)
        samples = self._source.samples_in(self._seed, start, batches)
        if self._is_restored and samples < self._next.samples and self._is_over(self._next):
            start = Position(start.epoch + 1)
        self._skip(start, batches)

    def _skip(self, start: Position, batches: int) -> None:
        samples = self._source.samples_in(self._seed, start, batches) if batches else 0
        self._move_to(replace(start, samples=samples, may_exceed=True))
        self._skipped = batches

    def pass_finished_epoch(self) -> None:
        """If the restored position is the end of an epoch, the next iteration runs the next epoch. Without this call it
        has no batches, so that a script whose epochs begin at `epoch` runs what follows its loop."""
        self._passes_finished_epoch = self._is_restored

    def _move_to(self, position: Position) -> None:
        self._next, self._is_positioned, self._is_restored, self._skipped = position, True, False, 0
        self._has_looked, self._reads_rest = False, None
        if self._loop is None:
            self._set_used(position)

    @property
    def has_unused_batches(self) -> bool:
        """Whether a save stores the position before batches that the script was given, since no step has used them."""
        saved, now = self._position_to_save(), self._now
        may_train = self._purpose != "evaluation" or self._is_in_window
        return may_train and (saved.epoch, saved.samples) < (now.epoch, now.samples)

    @property
    def may_have_unused_batches(self) -> bool:
        """The same; also before the first step in its loop, where it is not known yet whether one will use them."""
        may_train = self._purpose is None and self._loop is not None and self._loop.is_unused
        return may_train or self.has_unused_batches

    @property
    def keeps_unused(self) -> bool:
        """Whether its batches that no step has used are read again also after a further loop that begins now."""
        return self._loop is not None or self._is_in_window

    def note_window(self, is_open: bool) -> None:
        """Notes that its batches are in an accumulation window that is open, or that a window has ended."""
        if self._is_in_window and not is_open and self._loop is None:
            self._used = self._next
        self._is_in_window = is_open

    def note_step(self, newest: int = 0, last: Iterable[Loop] = ()) -> None:
        """Notes that an optimizer has stepped. `newest`: `last_yield` of the newest batch; `last`: loops at their end.

        Several loops may run at once (`zip`): a step uses the batches that each has yielded since the previous one. A
        loop that yielded before the first step and not after it is not training, unless that had no newer batch."""
        loop = self._loop
        if loop is not None and loop.is_unused:
            self._purpose = "training"
            loop.is_unused, loop.steps, loop.newest_at_step = False, loop.steps + 1, newest
            loop.ends_with = [other for other in last if other is not loop]
            self._used = replace(loop.position, may_be_over=bool(loop.ends_with))
            self._is_surely_trained |= loop.steps > 1 or newest <= loop.last_yield
        elif self._purpose is None or (loop and not self._is_surely_trained and newest > loop.newest_at_step > 0):
            self._purpose = "evaluation"
            if loop is None:
                self.note_backward()  # a look at it is an evaluation that was left early

    def state_dict(self) -> dict[str, Any]:
        """The position to resume from, as JSON values, the same on every rank. Prefetched batches do not count.

        For a training loader: the position of the last optimizer step, so batches not yet used by a step are read
        again. For others of a training run: the start of the epoch. Without any backward: the current position."""
        position = self._position_to_save()
        return {
            "epoch": position.epoch,
            "samples_seen": position.samples,
            "order": position.order,
            "seed": self._seed,
            "purpose": self._purpose,
            "may_be_over": position.may_be_over,
            "global_batch": self.total_batch_size,
            "dataset": stored_state(position.dataset, self._source.dataset, self._rank),
            **self._facts(),
        }

    def _position_to_save(self) -> Position:
        newest = self.newest_loop
        is_first_window = self._purpose is None and newest is not None and newest.is_trained_on and not newest.steps
        if self._purpose == "training" or is_first_window or self._is_in_window:
            return self._used
        if self._purpose == "evaluation":
            was_left = self.samples_seen > 0 and not (self.is_iterating or self._is_positioned)
            return Position(self.epoch + was_left)
        return self.ended.position if self._has_looked and self.ended is not None else self._now

    def load_state_dict(self, state: Mapping[str, Any], *, restart_epoch: bool = False) -> None:
        """The next iteration continues after the saved position, on any number of ranks and with any batch size.

        Raises CheckpointError where it is not valid for the data. With `restart_epoch` the saved epoch starts from its
        beginning where the data, or the way they are split, have changed."""
        problem = misfit(state, self._facts(), saved_ranks=None)
        if reason := self._loop_misfit(state) or (None if restart_epoch else problem):
            raise CheckpointError(f"data: {reason}.")
        if self._loop is not None:
            return  # it is already at this position
        self._seed, self._purpose, self._is_in_window = int(state["seed"]), state.get("purpose"), False
        self._move_to(Position(int(state["epoch"])) if problem else saved_position(state))
        self._is_restored = True

    def misfit(self, state: Mapping[str, Any], saved_ranks: int) -> str | None:
        """Why a position saved by `saved_ranks` ranks cannot be loaded here, and what to do; None where it can."""
        return self._loop_misfit(state) or misfit(state, self._facts(), saved_ranks)

    def _loop_misfit(self, state: Mapping[str, Any]) -> str | None:
        return None if self._loop is None or state == self.state_dict() else inside_loop(state)


def active_loader(loaders: Iterable[PreparedLoader]) -> PreparedLoader | None:
    """The loader being iterated that yielded last (the inner one for an evaluation inside a training loop)."""
    return max((one for one in loaders if one.is_iterating), key=lambda one: one.last_yield, default=None)
