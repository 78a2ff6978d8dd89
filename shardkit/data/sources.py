"""Where a prepared loader's batches come from: a map-style dataset by samples or by batches, or a stream.

A source turns the user's DataLoader into one of its own that reads this rank's part of every global batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from shardkit.data import sampler as order
from shardkit.data.private_random import stream_seed
from shardkit.data.sampler import Layout, Share, with_last
from shardkit.data.stream import EPOCH_IS_OVER, CountingCollate, Stream
from shardkit.data.workers import Indices, StartWorker, batches_of
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Piece:
    """One batch as a source hands it over. `samples` and `is_padded` speak of the whole global batch, `state` is the
    dataset's own position after it, where it has one."""

    batch: Any
    samples: int
    is_padded: bool
    is_last: bool
    state: Any = None


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


def source_of(loader: DataLoader, layout: Layout, split_batches: bool) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, layout)
    if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler:
        return SampledSource(loader, layout)
    return BatchSampledSource(loader, layout, split_batches)


def layout_of(loader: DataLoader, rank: int, world_size: int, split_batches: bool, even: bool) -> Layout:
    drops = loader.drop_last or bool(getattr(loader.batch_sampler, "drop_last", False))
    size = batch_size_of(loader)
    if not split_batches or size is None:
        return Layout(rank, world_size, world_size * (size or 1), drops, even)
    if size % world_size:
        raise UsageError(
            f"prepare: split_batches: batch_size must be a multiple of the number of ranks (got {size} for "
            f"{world_size} ranks); change one of them."
        )
    return Layout(rank, world_size, size, drops, even)


def batch_size_of(loader: DataLoader) -> int | None:
    """Samples in one of the loader's batches; None where the dataset, or a batch sampler of the user's, makes them."""
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else loader.batch_size


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
        counted = ((batch, self.stream.snapshot) for batch in batches_of(self.loader))
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
    return stream_seed(stream_seed(seed, epoch), layout.rank)


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
            indices.seed = stream_seed(self._seed, position)
            position += share.samples
            yield indices if self._is_batched else share.items[0]


def _sampled(loader: DataLoader, indices: ShareSampler, shares: Callable[[], Iterator[Share]]) -> Iterator[Piece]:
    """Batches beside their shares. No batch is read ahead here: what samples draw at random stays in step with the
    loop, and whether a batch is the last one is known from the shares."""
    indices.shares = shares
    for batch, (share, is_last) in zip(batches_of(loader), with_last(shares()), strict=True):
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
