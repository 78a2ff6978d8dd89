"""Prepared data loaders: one order for all ranks, a position in it that survives restarts, and the end told in time.

prepare_loader(DataLoader) -> PreparedLoader      the same batches as before, this rank's part of each
loader.state_dict()                               where the loop is, in samples of the whole run
skip_first_batches(loader, n)                     start this epoch after n batches
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal
from weakref import ReferenceType, WeakMethod, ref

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from shardkit.data.agreement import agreed_seed, own_seed
from shardkit.data.device import to_device
from shardkit.data.position import Position, facts_of, misfit, saved_position
from shardkit.data.sources import Piece, Source, batch_size_of, layout_of, source_of
from shardkit.errors import CheckpointError, UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

Purpose = Literal["training", "evaluation"]

_yields = count(1)


@dataclass
class Loop:
    """One iteration over a prepared loader, up to the batch that is out."""

    position: Position
    outer: "Loop | None" = None
    """The loop over the same loader that it was begun in."""
    batch_samples: int = 0
    """Samples in the global batch that is out, padding not counted."""
    is_last: bool = False
    is_padded: bool = False
    last_yield: int = 0
    began: int = field(default_factory=lambda: next(_yields))
    """The number of yields of all loaders before its own first."""
    local_samples: int | None = None
    """Samples in this rank's batch that is out; None where its tensors do not say."""
    tensors: list[ReferenceType[torch.Tensor]] = field(default_factory=list)
    """The tensors of this rank's batch that is out."""
    is_open: bool = True
    is_finished: bool = False
    """Whether it came to the end of its epoch; the position is that of the next one then."""
    is_unused: bool = False
    """Whether no step has used the batch that is out."""
    steps: int = 0
    """Optimizer steps that used its batches."""
    newest_at_step: int = 0
    """`last_yield` of the newest batch of any loader, when a step last used one of this loop's."""
    inner: int = 0
    """Loops that were begun inside this one."""
    has_inner_ended: bool = False
    """Whether one of them came to its end after the batch that is out was given."""

    def take(self, piece: Piece) -> None:
        """This batch is out now."""
        before = self.position
        self.position = Position(before.epoch, before.samples + piece.samples, piece.state, before.order)
        self.batch_samples, self.is_last, self.is_padded = piece.samples, piece.is_last, piece.is_padded
        self.is_unused, self.has_inner_ended = True, False
        self.last_yield = next(_yields)

    def given(self, batch: Any) -> Any:
        """The batch, as this rank's loop gets it."""
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self.tensors = [ref(tensor) for tensor in tensors]
        lengths = {len(tensor) for tensor in tensors if tensor.dim()}
        self.local_samples = lengths.pop() if len(lengths) == 1 else None
        return batch


def prepare_loader(
    loader: Any,
    rank: int,
    world_size: int,
    device: torch.device | None,
    seed: int | None = None,
    *,
    number: int = 0,
    split_batches: bool = False,
    even_batches: bool = True,
) -> "PreparedLoader":
    """The loader, giving this rank its part of every global batch, on `device`. Collective: every rank calls it.

    A global batch is batch_size x world_size samples; with split_batches, batch_size samples. The order comes from the
    seed of the loader's own generator, else from `seed`, else from rank 0's; `number` counts the loaders before this
    one that share its generator, or have none. A prepared loader comes back as it is.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"prepare: not a torch DataLoader (got {type(loader).__name__}); wrap the dataset in "
            "torch.utils.data.DataLoader."
        )
    source = source_of(loader, layout_of(loader, rank, world_size, split_batches, even_batches), split_batches)
    agreed = agreed_seed(source, own_seed(loader, seed, number), rank, world_size)
    return PreparedLoader(source, loader, rank, device, agreed)


class PreparedLoader:
    """A data loader as the training loop sees it: this rank's batches, on its device, and where the loop is.

    Iterating runs one epoch, or what is left of one after `load_state_dict` or `skip_first_batches`. An epoch that
    the loop leaves early is over: the next iteration starts the next one, as with any DataLoader. A loop inside a loop
    over the same loader runs an epoch of its own, and leaves the outer one where it is.

    Where the loop is, and what a save keeps of it, are two things: see `state_dict`.
    """

    def __init__(self, source: Source, users: DataLoader, rank: int, device: torch.device | None, seed: int) -> None:
        self.after_batch: WeakMethod[Callable[[PreparedLoader], None]] | None = None
        """Called when the loop comes back for more: all that belongs to the batch before is done. Weak: a loader that
        is in no cycle ends its workers as soon as nobody refers to it."""
        self._source = source
        self._users = users
        self._rank = rank
        self._device = device
        self._seed = seed
        self._loop: Loop | None = None
        self._ended: Loop | None = None
        self._next = self._used = Position()
        self._is_positioned = False
        self._is_restored = False
        self._purpose: Purpose | None = None
        self._facts = facts_of(source.dataset, source.dataset_length, source.split)

    def __iter__(self) -> Iterator[Any]:
        is_moved = self._is_positioned
        loop = self._loop = self._begin()
        epoch = loop.position.epoch
        try:
            for piece in self._source.pieces(self._seed, loop.position, is_moved):
                loop.take(piece)
                self._loop = loop  # loops over one loader may take turns
                yield loop.given(to_device(piece.batch, self._device))
                if self.after_batch is not None and (after_batch := self.after_batch()) is not None:
                    after_batch(self)
            loop.position, loop.is_finished = Position(epoch + 1), True
        finally:
            self._end(loop)

    def _begin(self) -> Loop:
        """A loop from where the position is."""
        outer, start = self._loop, self._next
        if self._is_positioned:
            self._is_positioned = self._is_restored = False
        elif outer is not None:
            outer.inner += 1
            start = Position(outer.position.epoch + outer.inner)
        elif start.samples:  # the last loop was left there
            start = Position(start.epoch + 1)
        if outer is not None and outer.has_inner_ended:
            outer = None  # an iterator that somebody keeps: whole loops pass without a batch from it
        if outer is None:
            self._next = self._used = start
        return Loop(start, outer)

    def _end(self, loop: Loop) -> None:
        """The loop is over, or left. A loop inside another that no step was made in leaves that one as it was found."""
        loop.is_open, outer, self._ended = False, loop.outer, loop
        if self._loop is not loop:
            return
        if outer is not None and outer.is_open and not loop.steps:
            self._loop, outer.has_inner_ended = outer, loop.is_finished
            return
        self._loop = None
        if not self._is_positioned and loop.position.epoch >= self._next.epoch:
            has_failed = not loop.last_yield and not loop.is_finished
            self._next, self._is_positioned = loop.position, has_failed
        if loop.is_finished:
            self._used = self._next

    @property
    def _now(self) -> Position:
        return self._next if self._loop is None else self._loop.position

    @property
    def is_iterating(self) -> bool:
        """Whether a loop over it is open."""
        return self._loop is not None

    @property
    def last_yield(self) -> int:
        """A number that grows with every batch of any loader; 0 outside of loops."""
        return 0 if self._loop is None else self._loop.last_yield

    @property
    def began(self) -> int:
        """As `last_yield`, of the moment when the loop began."""
        return 0 if self._loop is None else self._loop.began

    @property
    def local_samples(self) -> int | None:
        """Samples in this rank's batch that is out; None where its tensors do not say."""
        return None if self._loop is None else self._loop.local_samples

    def batch_tensors(self) -> list[torch.Tensor]:
        """Those of this rank's batch that is out (of an ended loop: the last one) which somebody still has."""
        loop = self._loop or self._ended
        found = [] if loop is None else [reference() for reference in loop.tensors]
        return [tensor for tensor in found if tensor is not None]

    @property
    def last_remainder(self) -> int:
        """As `remainder`, of the last batch of the loop that has ended."""
        return self._ended.batch_samples if self._ended is not None and self._ended.is_padded else -1

    @property
    def batch_samples(self) -> int:
        """Samples in the global batch that is out, padding not counted."""
        return 0 if self._loop is None else self._loop.batch_samples

    @property
    def end_of_loader(self) -> bool:
        """Whether the batch that is out is the epoch's last."""
        return self._loop is not None and self._loop.is_last

    @property
    def remainder(self) -> int:
        """Samples in the global batch that is out where padding follows them, else -1."""
        return self.batch_samples if self._loop is not None and self._loop.is_padded else -1

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, between loops the one that comes next."""
        return self._now.epoch

    @property
    def samples_seen(self) -> int:
        """Samples of this epoch that the loop has been given, over all ranks."""
        return self._now.samples

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return len(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._users, name)

    @property
    def batch_size(self) -> int | None:
        """Samples in this rank's batches; None where the dataset or a batch sampler of the user's makes them."""
        size = batch_size_of(self._users)
        return None if size is None else self._source.layout.global_batch // self._source.layout.world_size

    @property
    def total_batch_size(self) -> int:
        """Samples in a global batch, over all ranks."""
        return self._source.total_batch_size

    def set_epoch(self, epoch: int) -> None:
        """The next iteration runs this epoch. Naming the epoch that the position is in already leaves the position."""
        if self._is_positioned and epoch == self._next.epoch:
            return
        if self._is_restored and (self._next.samples or self._purpose == "training") and self._rank == 0:
            log.warning(
                f"data: set_epoch({epoch}) drops the restored position (epoch {self._next.epoch}, after "
                f"{self._next.samples:,} samples); start the epoch loop at loader.epoch, or do not call set_epoch."
            )
        self._move_to(Position(epoch))

    def skip_to(self, batches: int) -> None:
        """The next iteration starts after so many batches of the epoch, whatever position there was."""
        start = Position(self.epoch, order=self._now.order)
        self._move_to(replace(start, samples=self._source.samples_in(self._seed, start, batches)))

    def _move_to(self, position: Position) -> None:
        self._next, self._is_positioned, self._is_restored = position, True, False
        if self._loop is None:
            self._used = position

    def note_step(self, newest: int = 0) -> None:
        """An optimizer has stepped in a loop over a prepared loader; `newest` is the `last_yield` of the loop's batch.

        Several loops may be running (`zip` of two loaders): a step uses what each of them has given since the step
        before. One that gave a batch before the first step, and none after it, is kept by somebody and no training.
        """
        loop = self._loop
        if loop is not None and loop.is_unused:
            self._purpose, self._used = "training", self._now
            loop.is_unused, loop.steps, loop.newest_at_step = False, loop.steps + 1, newest
        elif self._purpose is None or (loop is not None and loop.steps == 1 and newest > loop.newest_at_step):
            self._purpose = "evaluation"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, JSON-able and the same on every rank; what is read ahead never counts.

        Of a loader that is trained on, the position of the last optimizer step: batches that no step has used yet come
        again. Of others, where some loader is trained on, the start of the epoch: no evaluation begins in the middle.
        Where none is, where the loop is.
        """
        position = self._position_to_save()
        return {
            "epoch": position.epoch,
            "samples_seen": position.samples,
            "order": position.order,
            "seed": self._seed,
            "purpose": self._purpose,
            "global_batch": self.total_batch_size,
            "dataset": position.dataset if _is_jsonable(position.dataset) else None,
            **self._facts,
        }

    def _position_to_save(self) -> Position:
        if self._purpose == "training":
            return self._used
        if self._purpose == "evaluation":
            was_left = self.samples_seen > 0 and not (self.is_iterating or self._is_positioned)
            return Position(self.epoch + was_left)
        return self._now

    def load_state_dict(self, state: Mapping[str, Any], *, restart_epoch: bool = False) -> None:
        """The next iteration continues after the saved position, on any number of ranks and with any batch size.

        Raises CheckpointError where `misfit` says so; `restart_epoch` starts the saved epoch anew where the data are
        others, or are split otherwise.
        """
        problem = misfit(state, self._facts, saved_ranks=None)
        if reason := self._loop_misfit(state) or (None if restart_epoch else problem):
            raise CheckpointError(f"data: {reason}.")
        if self._loop is not None:
            return  # where it is already
        self._seed, self._purpose = int(state["seed"]), state.get("purpose")
        self._move_to(Position(int(state["epoch"])) if problem else saved_position(state))
        self._is_restored = True

    def misfit(self, state: Mapping[str, Any], saved_ranks: int) -> str | None:
        """Why a position that so many ranks saved cannot be loaded here, and what to do; None where it can."""
        return self._loop_misfit(state) or misfit(state, self._facts, saved_ranks)

    def _loop_misfit(self, state: Mapping[str, Any]) -> str | None:
        if self._loop is None or state == self.state_dict():
            return None
        return (
            "a position cannot be loaded inside the loop over its loader, which goes on where it is (got epoch "
            f"{state['epoch']}, {state['samples_seen']:,} samples); leave the loop first, and the except clause of "
            "what it raised, and drop iterators that are kept, or load_state(..., data_position=False)"
        )


def active_loader(loaders: Iterable[PreparedLoader]) -> PreparedLoader | None:
    """The loader whose batch is out: of those being iterated, the one that yielded last (an evaluation inside a
    training loop is the innermost)."""
    return max(
        (loader for loader in loaders if loader.is_iterating), key=lambda loader: loader.last_yield, default=None
    )


def skip_first_batches(loader: Any, batches: int) -> Any:
    """The loader, whose next iteration leaves out the first so many batches of its epoch.

    It counts from the start of the epoch and replaces a restored position, so skipping by hand after `load_state` does
    not skip twice. A loader that is not prepared is read and its first batches dropped.
    """
    if batches < 0:
        raise UsageError(f"skip_first_batches: the number must not be negative (got {batches}).")
    if not isinstance(loader, PreparedLoader):
        return _Skipping(loader, batches)
    loader.skip_to(batches)
    return loader


@dataclass(frozen=True)
class _Skipping:
    loader: Any
    batches: int

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.batches, None)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.batches)


def _is_jsonable(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
