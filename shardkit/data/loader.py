"""Prepared data loaders: one order for all ranks, a position in it that survives restarts, and the end told in time.

prepare_loader(DataLoader) -> PreparedLoader      the same batches as before, this rank's part of each
loader.state_dict()                               where the loop is, in samples of the whole run
skip_first_batches(loader, n)                     start this epoch after n batches
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardkit.data.device import to_device
from shardkit.data.private_random import stream_seed
from shardkit.data.sources import Piece, Source, StreamSource, batch_size_of, layout_of, source_of
from shardkit.distributed import control
from shardkit.errors import CheckpointError, UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

Purpose = Literal["training", "evaluation"]

_yields = count(1)


@dataclass(frozen=True)
class Position:
    """A place in the data, in samples of the whole run; `dataset` is its own state there, where it has one."""

    epoch: int = 0
    samples: int = 0
    dataset: Any = None


def prepare_loader(
    loader: Any,
    rank: int,
    world_size: int,
    device: torch.device | None,
    seed: int | None = None,
    *,
    split_batches: bool = False,
    even_batches: bool = True,
) -> "PreparedLoader":
    """The loader, giving this rank its part of every global batch, on `device`. Collective: every rank calls it.

    A global batch is batch_size x world_size samples; with split_batches, batch_size samples. Without a `seed`, the
    one of the loader's own generator is used, else rank 0's. A prepared loader comes back as it is.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"prepare: not a torch DataLoader (got {type(loader).__name__}); wrap the dataset in "
            "torch.utils.data.DataLoader."
        )
    layout = layout_of(loader, rank, world_size, split_batches, even_batches)
    source = source_of(loader, layout, split_batches)
    return PreparedLoader(source, loader, device, _agreed_seed(source, loader, world_size, seed))


def _agreed_seed(source: Source, loader: DataLoader, world_size: int, seed: int | None) -> int:
    """The same number on every rank: rank 0's. Raises UsageError on all ranks where their data differ in size, which
    would have one of them wait for batches that never come. Collective."""
    generator = loader.generator or getattr(loader.sampler, "generator", None)
    if seed is None:
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    if world_size == 1 or not dist.is_initialized():
        return seed
    own = [seed, source.dataset_length, source.total_batch_size]
    problem, agreed = control.start().decide(own, lambda told: (_different_sizes(told), told[0][0]))
    if problem:
        raise UsageError(problem)
    return agreed


def _different_sizes(told: list[list[Any]]) -> str | None:
    for number, what in ((1, "the dataset's length"), (2, "the global batch size")):
        sizes = [own[number] for own in told]
        if len(set(sizes)) > 1:
            return (
                f"prepare: {what} is not the same on all ranks (got {', '.join(map(str, sizes[:8]))} by rank); give "
                "every rank the whole dataset and the same batch_size: shardkit shards it."
            )
    return None


class PreparedLoader:
    """A data loader as the training loop sees it: this rank's batches, on its device, and where the loop is.

    Iterating runs one epoch, or what is left of one after `load_state_dict` or `skip_first_batches`. An epoch that
    the loop leaves early is over: the next iteration starts the next one, as with any DataLoader.

    Where the loop is, and what a save keeps of it, are two things: see `state_dict`.
    """

    def __init__(self, source: Source, users: DataLoader, device: torch.device | None, seed: int) -> None:
        self.end_of_loader = False
        self.remainder = -1
        self.is_iterating = False
        self.last_yield = 0
        self.batch_samples = 0
        """Samples in the global batch that is out, padding not counted."""
        self.after_batch: Callable[[PreparedLoader], None] | None = None
        """Called when the loop comes back for more: all that belongs to the batch before is done."""
        self._source = source
        self._users = users
        self._device = device
        self._seed = seed
        self._is_positioned = False
        self._is_restored = False
        self._purpose: Purpose | None = None
        self._place(Position())

    def _place(self, position: Position) -> None:
        """All before this position is done with."""
        self._now = self._used = position

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, between loops the one that comes next."""
        return self._now.epoch

    @property
    def samples_seen(self) -> int:
        """Samples of this epoch that the loop has been given, over all ranks."""
        return self._now.samples

    def __iter__(self) -> Iterator[Any]:
        self._start()
        try:
            for piece in self._source.pieces(self._seed, self.epoch, self.samples_seen):
                self._advance(piece)
                yield to_device(piece.batch, self._device)
                if self.after_batch is not None:
                    self.after_batch(self)
        finally:
            self.is_iterating = self.end_of_loader = False
            self.remainder = -1
        self._place(Position(self.epoch + 1))

    def _start(self) -> None:
        if self.samples_seen and not self._is_positioned:
            self._place(Position(self.epoch + 1))
        self._is_positioned = self._is_restored = False
        self.is_iterating = True
        self._source.loader.generator.manual_seed(stream_seed(self._seed, self.epoch))

    def _advance(self, piece: Piece) -> None:
        self._now = Position(self.epoch, self.samples_seen + piece.samples, piece.state)
        self.batch_samples = piece.samples
        self.end_of_loader = piece.is_last
        self.remainder = piece.samples if piece.is_padded else -1
        self.last_yield = next(_yields)

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
        if epoch == self.epoch and self._is_positioned:
            return
        if self._is_restored and (self.samples_seen or self._purpose == "training") and self._source.layout.rank == 0:
            log.warning(
                f"data: set_epoch({epoch}) drops the restored position (epoch {self.epoch}, after "
                f"{self.samples_seen:,} samples); start the epoch loop at loader.epoch, or do not call set_epoch."
            )
        self._move_to(Position(epoch))

    def skip_to(self, batches: int) -> None:
        """The next iteration starts after so many batches of the epoch, whatever position there was."""
        self._move_to(Position(self.epoch, self._source.samples_in(self._seed, self.epoch, batches)))

    def _move_to(self, position: Position) -> None:
        self._place(position)
        self._is_positioned, self._is_restored = True, False
        if isinstance(self._source, StreamSource):
            self._source.stream.saved = position.dataset

    def note_step(self) -> None:
        """An optimizer has stepped in a loop over a prepared loader: all batches that are out are used.

        Several loops may be running (`zip` of two loaders): a step uses what all of them gave.
        """
        if self.is_iterating:
            self._purpose, self._used = "training", self._now
        elif self._purpose is None:
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
            "seed": self._seed,
            "purpose": self._purpose,
            "dataset_length": self._source.dataset_length,
            "global_batch": self.total_batch_size,
            "dataset": position.dataset if _is_jsonable(position.dataset) else None,
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

        Raises CheckpointError where the dataset has another length; `restart_epoch` starts the saved epoch anew then.
        Also inside the loop over this loader, unless the saved position is its own: that loop would go on elsewhere.
        """
        if self.is_iterating:
            if state == self.state_dict():
                return
            raise CheckpointError(
                f"data: a position cannot be loaded inside the loop over its loader, which goes on where it is (got "
                f"epoch {state['epoch']}, {state['samples_seen']:,} samples); leave the loop first, and the except "
                "clause of what it raised, or load_state(..., data_position=False)."
            )
        saved, own = state.get("dataset_length"), self._source.dataset_length
        if saved != own and not restart_epoch:
            raise CheckpointError(
                f"data: the dataset has another length than when the position was saved (got {_count(own)}, saved "
                f"{_count(saved)}); use the same data, or load_state_dict(state, restart_epoch=True) to start the "
                "epoch anew, or load_state(..., data_position=False) to leave the position out."
            )
        self._seed, self._purpose = int(state["seed"]), state.get("purpose")
        samples = 0 if restart_epoch and saved != own else int(state["samples_seen"])
        dataset = state.get("dataset") if samples and isinstance(self._source, StreamSource) else None
        self._move_to(Position(int(state["epoch"]), samples, dataset))
        self._is_restored = True


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


def _count(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"
