"""Prepared data loaders: one order for all ranks, a position in it that survives restarts, and the end told in time.

prepare_loader(DataLoader) -> PreparedLoader      the same batches as before, this rank's part of each
loader.state_dict()                               where the loop is, in samples of the whole run
skip_first_batches(loader, n)                     start this epoch after n batches
"""

import atexit
import json
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import count, islice
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from shardkit.data import sampler as order
from shardkit.data.sampler import Layout, Share, with_last
from shardkit.data.stream import EPOCH_IS_OVER, CountingCollate, Stream
from shardkit.distributed import control
from shardkit.distributed.seed import set_seed
from shardkit.errors import CheckpointError, UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

Purpose = Literal["training", "evaluation"]

_yields = count(1)
_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class Piece:
    """One batch as a source hands it over. `samples` and `is_padded` speak of the whole global batch, `state` is the
    dataset's own position after it, where it has one."""

    batch: Any
    samples: int
    is_padded: bool
    is_last: bool
    state: Any = None


@dataclass(frozen=True)
class Position:
    """A place in the data, in samples of the whole run; `dataset` is its own state there, where it has one."""

    epoch: int = 0
    samples: int = 0
    dataset: Any = None


class Source(Protocol):
    """Where batches come from: a map-style dataset or a stream."""

    loader: DataLoader
    layout: Layout
    total_batch_size: int
    dataset_length: int | None

    def pieces(self, seed: int, epoch: int, start: int) -> Iterator[Piece]:
        """This rank's batches of an epoch, from a position in samples on."""

    def samples_in(self, seed: int, epoch: int, batches: int) -> int:
        """How many samples the first so many global batches of an epoch hold."""

    def __len__(self) -> int: ...


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
    layout = _layout(loader, rank, world_size, split_batches, even_batches)
    source = _source(loader, layout, split_batches)
    return PreparedLoader(source, loader, device, _agreed_seed(source, loader, world_size, seed))


def _layout(loader: DataLoader, rank: int, world_size: int, split_batches: bool, even: bool) -> Layout:
    drops = loader.drop_last or bool(getattr(loader.batch_sampler, "drop_last", False))
    size = _batch_size(loader)
    if not split_batches or size is None:
        return Layout(rank, world_size, world_size * (size or 1), drops, even)
    if size % world_size:
        raise UsageError(
            f"prepare: split_batches: batch_size must be a multiple of the number of ranks (got {size} for "
            f"{world_size} ranks); change one of them."
        )
    return Layout(rank, world_size, size, drops, even)


def _batch_size(loader: DataLoader) -> int | None:
    """Samples in one of the loader's batches; None where the dataset, or a batch sampler of the user's, makes them."""
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else loader.batch_size


def _source(loader: DataLoader, layout: Layout, split_batches: bool) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, layout)
    if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
        return SampledSource(loader, layout)
    return BatchSampledSource(loader, layout, split_batches)


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


class SampledSource:
    """A map-style dataset with a sampler of single indices."""

    def __init__(self, loader: DataLoader, layout: Layout) -> None:
        self.layout = layout
        self.total_batch_size = layout.global_batch
        self.dataset_length: int | None = len(loader.dataset)  # type: ignore[arg-type]
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._sampler = _without_ranks(sampler, loader.dataset)
        self._indices = ShareSampler(is_batched=loader.batch_sampler is not None)
        self.loader = _rebuilt(loader, **self._indices.as_argument())

    def pieces(self, seed: int, epoch: int, start: int) -> Iterator[Piece]:
        drawn = order.draw(self._sampler, seed, epoch)
        self._indices.start_at(_seed_of_rank(seed, epoch, self.layout), start)
        return _sampled(self.loader, self._indices, partial(order.shares_of_samples, drawn, start, self.layout))

    def samples_in(self, seed: int, epoch: int, batches: int) -> int:
        return min(batches * self.total_batch_size, len(self._sampler))

    def __len__(self) -> int:
        return _number_of_batches(len(self._sampler), self.layout)


class BatchSampledSource:
    """A map-style dataset with a batch sampler of the user's own."""

    def __init__(self, loader: DataLoader, layout: Layout, split_batches: bool) -> None:
        sampler: Any = loader.batch_sampler
        size = getattr(sampler, "batch_size", None)
        self.layout = Layout(layout.rank, layout.world_size, layout.world_size, layout.drop_last, layout.even)
        self.total_batch_size = (size or 1) * (1 if split_batches else layout.world_size)
        self.dataset_length: int | None = len(loader.dataset)  # type: ignore[arg-type]
        self._sampler = sampler
        self._split_batches = split_batches
        self._indices = ShareSampler(is_batched=True)
        self.loader = _rebuilt(loader, **self._indices.as_argument())

    def pieces(self, seed: int, epoch: int, start: int) -> Iterator[Piece]:
        shares_of = order.shares_of_each_batch if self._split_batches else order.shares_of_batches
        batches = order.draw(self._sampler, seed, epoch)
        self._indices.start_at(_seed_of_rank(seed, epoch, self.layout), start)
        return _sampled(self.loader, self._indices, partial(shares_of, batches, start, self.layout))

    def samples_in(self, seed: int, epoch: int, batches: int) -> int:
        taken = batches if self._split_batches else batches * self.layout.world_size
        return sum(len(batch) for batch in islice(order.draw(self._sampler, seed, epoch), taken))

    def __len__(self) -> int:
        return len(self._sampler) if self._split_batches else _number_of_batches(len(self._sampler), self.layout)


class StreamSource:
    """An iterable dataset."""

    def __init__(self, loader: DataLoader, layout: Layout) -> None:
        self._ranks_beside = 1
        if getattr(loader.dataset, "_distributed", None) is not None:
            log.info("data: the dataset is already split by rank; it is not sharded again.")
            self._ranks_beside = layout.world_size
            layout = Layout(0, 1, layout.global_batch // layout.world_size, layout.drop_last, layout.even)
        self.layout = layout
        self.total_batch_size = layout.global_batch * self._ranks_beside
        self.dataset_length: int | None = _length_of(loader.dataset)
        self.stream = Stream(loader.dataset, layout)
        collate = CountingCollate(loader.collate_fn, is_batched=loader.batch_size is not None)
        size = None if loader.batch_size is None else layout.global_batch // layout.world_size
        self.loader = _rebuilt(loader, self.stream, batch_size=size, collate_fn=collate)

    def pieces(self, seed: int, epoch: int, start: int) -> Iterator[Piece]:
        self.stream.start_at(seed, epoch, start // self._ranks_beside)
        # The snapshot is taken between a batch and the look-ahead to the next, so it belongs to that batch.
        counted = ((batch, self.stream.snapshot) for batch in _batches_of(self.loader))
        for (batch, state), is_last in with_last(counted):
            if is_last and state is not None:  # the dataset may be at its beginning again
                state = EPOCH_IS_OVER
            yield Piece(batch.batch, batch.samples * self._ranks_beside, batch.is_padded, is_last, state)

    def samples_in(self, seed: int, epoch: int, batches: int) -> int:
        return batches * self.total_batch_size

    def __len__(self) -> int:
        return _number_of_batches(len(self.stream.dataset) // self._ranks_beside, self.layout)


def _without_ranks(sampler: Any, dataset: Any) -> Any:
    """The sampler to draw the whole order from: torch's DistributedSampler is replaced by what it shards."""
    if order.is_rank_aware(sampler):
        log.info(f"data: {type(sampler).__name__} already shards over ranks; shardkit shards its whole order instead.")
    if not order.is_plain_distributed(sampler):
        return sampler
    return RandomSampler(dataset) if sampler.shuffle else SequentialSampler(dataset)


def _number_of_batches(samples: int, layout: Layout) -> int:
    return samples // layout.global_batch if layout.drop_last else -(-samples // layout.global_batch)


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _seed_of_rank(seed: int, epoch: int, layout: Layout) -> int:
    return order.stream_seed(order.stream_seed(seed, epoch), layout.rank)


class Indices(list):
    """A batch's indices. Where they arrive in a worker, what its samples draw at random is seeded, so that the draws
    are the batch's own: other ones on every rank, and after a resume the same as without it."""

    seed = 0

    def __reduce__(self) -> Any:
        return _arrived, (list(self), self.seed)


def _arrived(indices: list[Any], seed: int) -> list[Any]:
    if get_worker_info() is not None:
        set_seed(seed)
    return indices


class ShareSampler(Sampler):
    """What the rebuilt DataLoader takes its indices from: the shares of the epoch at hand."""

    def __init__(self, is_batched: bool) -> None:
        self._is_batched = is_batched
        self._seed = self._start = 0
        self.shares: Callable[[], Iterator[Share]] = lambda: iter(())

    def start_at(self, seed: int, start: int) -> None:
        """Random draws in workers are functions of this seed and the batch's position, which begins at `start`."""
        self._seed, self._start = seed, start

    def as_argument(self) -> dict[str, Any]:
        """How DataLoader is given it: in place of batches, or of single indices where it does not batch."""
        return {"batch_sampler": self} if self._is_batched else {"batch_size": None, "sampler": self}

    def __iter__(self) -> Iterator[Any]:
        position = self._start
        for share in self.shares():
            indices = Indices(share.items)
            indices.seed = order.stream_seed(self._seed, position)
            position += share.samples
            yield indices if self._is_batched else share.items[0]


def _sampled(loader: DataLoader, indices: ShareSampler, shares: Callable[[], Iterator[Share]]) -> Iterator[Piece]:
    """Batches beside their shares. No batch is read ahead here: what samples draw at random stays in step with the
    loop, and whether a batch is the last one is known from the shares."""
    indices.shares = shares
    for batch, (share, is_last) in zip(_batches_of(loader), with_last(shares()), strict=True):
        yield Piece(batch, share.samples, share.is_padded, is_last)


def _rebuilt(loader: DataLoader, dataset: Any = None, **changes: Any) -> DataLoader:
    """A DataLoader as the user's, but for what changes. Seeds of its workers come from a generator of its own, so that
    starting an epoch draws nothing from the global one."""
    same = ("num_workers", "collate_fn", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    kept = {name: getattr(loader, name) for name in (*same, "in_order")}
    kept["pin_memory"] = loader.pin_memory and torch.accelerator.is_available()
    start = StartWorker(loader.worker_init_fn) if loader.num_workers else None
    kept |= {"worker_init_fn": start, "generator": torch.Generator(), **changes}
    return DataLoader(loader.dataset if dataset is None else dataset, **kept)


class StartWorker:
    """What runs first in a worker: it leaves the signals that stop a run to its rank, which still has to save."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._users is not None:
            self._users(worker)


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
        self._source.loader.generator.manual_seed(order.stream_seed(self._seed, self.epoch))

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
        size = _batch_size(self._users)
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


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same nesting of dicts, lists, tuples and objects with `.to`, every tensor on the device."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=value.device.type == "cpu" and value.is_pinned())
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    return value


def _is_jsonable(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _count(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"


def _batches_of(loader: DataLoader) -> Iterator[Any]:
    """The loader's batches. Its workers ignore SIGTERM, which is how Python would end them at exit (and wait for them
    for ever), so they are ended here where an iteration is still open then."""
    if not loader.num_workers:
        return iter(loader)
    # Workers inherit the mask, so that none dies of a signal that comes before StartWorker has run.
    found = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        iterator = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)
    _stop_workers_at_exit()
    _with_workers.add(iterator)
    return iterator


@cache
def _stop_workers_at_exit() -> None:
    atexit.register(_stop_workers)


def _stop_workers() -> None:
    for iterator in list(_with_workers):
        iterator._shutdown_workers()
        for worker in iterator._workers:
            if worker.is_alive():
                worker.kill()
