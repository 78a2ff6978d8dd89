"""The sources of a prepared loader's batches: a map-style dataset by samples or by batches, or a stream.

A source rebuilds the user's DataLoader as one that reads this rank's part of every global batch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from shardkit.data import hugging_face, sampler, shares
from shardkit.data.first_items import COMPARED, digests_of, fields_of
from shardkit.data.position import EPOCH_IS_OVER, Position
from shardkit.data.sampler import Drawn
from shardkit.data.shares import BatchLayout, Share, number_of_batches, with_last
from shardkit.data.stream import CountingCollate, Start, Stream, compared, end_together, split_of
from shardkit.data.workers import Indices, StartWorker, batches_of, of_one_loop
from shardkit.distributed import control
from shardkit.distributed.seed import stream_seed
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Piece:
    """One batch of a source. `samples`, `is_padded` and `batches` describe the whole global batch, as in `Share`;
    `of_rank`: the samples of this rank. `state` is the dataset's own state after it, where it has one. `first`, of a
    loop's first batch, where every rank reads the whole order or stream: digests of its first items."""

    batch: Any
    samples: int
    of_rank: int
    is_padded: bool
    is_last: bool
    state: Any = None
    first: list[str] | None = None
    batches: int | None = None


class Source(Protocol):
    """A source of batches: a map-style dataset or a stream."""

    loader: DataLoader
    """The user's, rebuilt to read this rank's part."""
    dataset: Any
    split: tuple[int, int] | None
    """(rank, world size) of a stream that is already split by rank; else None."""
    layout: BatchLayout
    total_batch_size: int
    dataset_length: int | None
    units: int | None
    """Length of an epoch over all ranks, in the units of `layout.global_batch`; None where unknown."""
    sampler: str | None
    """The class of what orders a map-style dataset; None of a stream."""

    def pieces(self, seed: int, start: Position, is_moved: bool, is_inside: bool) -> Iterator[Piece]:
        """This rank's batches from a position to the end of its epoch. `is_moved`: the position was set, and does not
        follow the batches read before. `is_inside`: another loop is reading, and goes on afterwards."""

    def is_over(self, seed: int, position: Position) -> bool:
        """Whether no batches come after a position that was not saved at a last batch; False where only reading the
        sampler or the stream would tell. (One with a private generator would then give another order.)"""

    def samples_in(self, seed: int, start: Position, batches: int) -> int:
        """Number of samples in the first `batches` global batches of the position's epoch; maybe more where only
        reading would tell its end."""

    def __len__(self) -> int: ...


def source_of(loader: DataLoader, layout: BatchLayout, split_batches: bool) -> Source:
    """The source for this loader's dataset and sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, layout)
    batches = batch_sampler_of(loader)
    if batches is None or _is_plain(batches, loader):
        own = _without_ranks(getattr(batches, "sampler", loader.sampler), loader.dataset)
        return SampledSource(loader, layout, own, shares.shares_of_drawn)
    layout = replace(layout, global_batch=1 if split_batches else layout.world_size)
    shares_of = shares.shares_of_each_batch if split_batches else shares.shares_of_batches
    return SampledSource(loader, layout, batches, shares_of, has_batches=True)


def layout_of(loader: DataLoader, rank: int, world_size: int, split_batches: bool, even: bool) -> BatchLayout:
    """How the loader's batches form global batches. UsageError where they cannot be split evenly."""
    drops = loader.drop_last or bool(getattr(batch_sampler_of(loader), "drop_last", False))
    size = batch_size_of(loader)
    if not split_batches or size is None:
        return BatchLayout(rank, world_size, world_size * (size or 1), drops, even)
    if size % world_size:
        raise UsageError(
            f"prepare: split_batches: batch_size must be a multiple of the number of ranks (got {size} for "
            f"{world_size} ranks); change one of them."
        )
    return BatchLayout(rank, world_size, size, drops, even)


def batch_size_of(loader: DataLoader) -> int | None:
    """Samples in one of the loader's batches; None where the dataset or a custom batch sampler forms them."""
    batches = batch_sampler_of(loader)
    return batches.batch_size if type(batches) is BatchSampler else loader.batch_size


def _is_plain(batches: Any, loader: DataLoader) -> bool:
    """Whether it groups single indices in their order: torch's, or a loader's own in its place, as torchdata's
    StatefulDataLoader makes."""
    is_the_loaders = loader.batch_size is not None and getattr(batches, "sampler", None) is loader.sampler
    return type(batches) is BatchSampler or (is_the_loaders and isinstance(batches, BatchSampler))


def batch_sampler_of(loader: DataLoader) -> Any:
    """What yields the indices of a batch: also a BatchSampler as `sampler`, whose lists the dataset gets whole; None
    where the dataset forms the batches."""
    own: Any = loader.sampler
    return own if loader.batch_sampler is None and isinstance(own, BatchSampler) else loader.batch_sampler


def _grouping_of(batches: Any) -> dict[str, Any]:
    """By name, how torch's BatchSampler groups samples; nothing of a script's own, which is iterated."""
    names = ("sampler", "batch_size", "drop_last") if type(batches) is BatchSampler else ()
    return {name: getattr(batches, name) for name in names}


class SampledSource:
    """A map-style dataset in the order of a sampler of single indices, or (`has_batches`) of a custom batch sampler,
    whose batches are then the units of `layout.global_batch`."""

    split: tuple[int, int] | None = None

    def __init__(
        self,
        loader: DataLoader,
        layout: BatchLayout,
        user_sampler: Any,
        shares_of: Callable[[Drawn, Position, BatchLayout], Iterator[Share]],
        has_batches: bool = False,
    ) -> None:
        """`shares_of`: this rank's part of an order that has to be drawn."""
        size = getattr(user_sampler, "batch_size", None) if has_batches else 1
        self.layout, self.total_batch_size = layout, layout.global_batch * (size or 1)
        self.dataset = loader.dataset
        self.dataset_length = sampler.length_of(loader.dataset)
        self.units = sampler.epoch_length(user_sampler)
        self.sampler: str | None = type(user_sampler).__name__
        self._sampler, self._shares_of, self._has_batches = user_sampler, shares_of, has_batches
        self._batches = batch_sampler_of(loader)
        self._grouping = _grouping_of(self._batches)
        self._indices = CurrentIndices(loader)
        self.loader = _rebuilt(loader, **self._indices.as_argument())

    def pieces(self, seed: int, start: Position, is_moved: bool, is_inside: bool) -> Iterator[Piece]:
        """No batch is read ahead here, so random draws of samples stay in step with the loop; the shares say which
        batch is the last."""
        self._refuse_changes()
        if start.dataset == EPOCH_IS_OVER:
            return
        order = self._known_order(seed, start) or self._drawn(seed, start)
        loader, seed_of_rank = of_one_loop(self.loader), _seed_of_rank(seed, start.epoch, self.layout.rank)
        loader.generator.manual_seed(seed_of_rank)
        handed_out: deque[Share] = deque()
        begins: list[str] | None = None

        def indices() -> Iterator[Any]:
            position = start.samples
            for share in self._own_shares(order, start):
                handed_out.append(share)
                batch = list(share.items)
                if loader.num_workers:
                    batch = Indices(batch)
                    batch.seed = stream_seed(seed_of_rank, position)
                position += share.samples
                yield batch if self._indices.yields_lists else batch[0]

        self._indices.current = indices()
        for number, batch in enumerate(batches_of(loader)):
            share, first = handed_out.popleft(), None if number else _first_of(order)
            if isinstance(order, Drawn) and number == 0:
                begins = digests_of(order.first)
                if self.layout.rank == 0:
                    _warn_of_another_order(order.name, begins, start.dataset)
            after = EPOCH_IS_OVER if share.is_last else begins
            of_rank = len(share.items)
            yield Piece(batch, share.samples, of_rank, share.is_padded, share.is_last, after, first, share.batches)

    def is_over(self, seed: int, position: Position) -> bool:
        known = self._known_order(seed, position) if position.samples else None
        return known is not None and not number_of_batches(known.length - position.samples, self.layout)

    def samples_in(self, seed: int, start: Position, batches: int) -> int:
        if self._has_batches:
            order, size = self._drawn(seed, start), self.layout.global_batch
            return sum(len(batch) for _ in range(batches) for batch in order.take(size))
        wanted, known = batches * self.total_batch_size, self._known_order(seed, start)
        return wanted if known is None else min(wanted, known.length)

    def _refuse_changes(self) -> None:
        """UsageError where the script has changed torch's batch sampler since prepare, which has read it."""
        now = _grouping_of(self._batches)
        for name in (name for name, value in self._grouping.items() if value != now[name]):
            raise UsageError(
                f"data: batch_sampler.{name} of a prepared loader cannot be changed; prepare a new DataLoader with it."
            )

    def _known_order(self, seed: int, position: Position) -> sampler.Indexed | None:
        return sampler.indexed(self._sampler, seed, position.epoch, position.order)

    def _drawn(self, seed: int, position: Position) -> Drawn:
        """The epoch's order. Its first items are kept, for padding and to compare ranks."""
        return Drawn(self._sampler, seed, position.epoch, keep=max(self.layout.world_size - 1, COMPARED))

    def _own_shares(self, order: sampler.Indexed | Drawn, start: Position) -> Iterator[Share]:
        if isinstance(order, Drawn):
            return self._shares_of(order, start, self.layout)
        return shares.shares_of_indexed(order, start.samples, self.layout)

    def __len__(self) -> int:
        return number_of_batches(len(self._sampler) * sampler.shares_in(self._sampler), self.layout)


@contextmanager
def padded_as_told(sources: Iterable[Source], even: bool) -> Iterator[None]:
    """Inside, loops that begin over map-style data pad the last batch, or without `even` split it as it is, if every
    rank gets a sample of it."""
    found = [(source, source.layout) for source in sources if isinstance(source, SampledSource)]
    for source, layout in found:
        source.layout = replace(layout, even=even, pads_the_shortest=not even)
    try:
        yield
    finally:
        for source, layout in found:
            source.layout = layout


class StreamSource:
    """An iterable dataset. One that is already split by rank is not split again; its epoch ends on all ranks with the
    shortest part."""

    sampler: str | None = None

    def __init__(self, loader: DataLoader, layout: BatchLayout) -> None:
        self.dataset, self.split = loader.dataset, split_of(loader.dataset)
        self._rank, self._parts = layout.rank, layout.world_size if self.split else 1
        own_size = layout.global_batch // layout.world_size
        self.layout = replace(layout, rank=0, world_size=1, global_batch=own_size) if self.split else layout
        _say_how_it_is_read(loader.dataset, self.split, layout.world_size)
        self.total_batch_size = layout.global_batch
        self.dataset_length = self.units = sampler.length_of(loader.dataset)
        self.stream, self._is_moved = Stream(loader.dataset, self.layout, loader.batch_size is None), False
        if loader.persistent_workers:
            self.stream.share_start()
        collate = CountingCollate(loader.collate_fn, is_batched=loader.batch_size is not None)
        size = None if loader.batch_size is None else own_size
        self.loader = _rebuilt(loader, self.stream, batch_size=size, collate_fn=collate)

    def pieces(self, seed: int, start: Position, is_moved: bool, is_inside: bool) -> Iterator[Piece]:
        self._is_moved |= is_moved or is_inside
        if start.dataset == EPOCH_IS_OVER:
            return
        seed_of_rank = _seed_of_rank(seed, start.epoch, self._rank)
        loader = of_one_loop(self.loader, dataset=self.stream.of_one_loop(is_inside))
        loader.generator.manual_seed(seed_of_rank)
        stream: Any = loader.dataset
        own_seed, own_samples = stream_seed(seed, start.epoch), start.samples // self._parts
        stream.start_at(Start(own_seed, seed_of_rank, start.epoch, own_samples, self._is_moved, start.may_exceed))
        stream.start_from(start.dataset, start.samples)
        self._is_moved = False
        # The snapshot is taken before the look-ahead to the next batch, so it belongs to this batch.
        batches = with_last((batch, stream.state()) for batch in compared(batches_of(loader), stream))
        counted: Iterator[tuple[Any, bool, int]] = ((value, is_last, value[0].samples) for value, is_last in batches)
        if self._parts > 1:
            counted = end_together(batches, lambda value: value[0].samples, self._parts)
        for (batch, state), is_last, last_samples in counted:
            if batch.problem:
                raise UsageError(batch.problem)
            samples = last_samples if is_last else batch.samples * self._parts
            after, first = EPOCH_IS_OVER if is_last else state, batch.first if self._parts == 1 else None
            value = batch.batch(loader.pin_memory)
            yield Piece(value, samples, batch.of_rank, batch.is_padded, is_last, after, first)

    def is_over(self, seed: int, position: Position) -> bool:
        return False

    def samples_in(self, seed: int, start: Position, batches: int) -> int:
        return batches * self.total_batch_size

    def __len__(self) -> int:
        return number_of_batches(len(self.stream.dataset), self.layout)


def _say_how_it_is_read(dataset: Any, split: tuple[int, int] | None, world_size: int) -> None:
    if split is not None:
        log.info("data: the dataset is already split by rank; it is not sharded again.")
    elif world_size > 1 and hugging_face.is_stream(dataset):
        log.info(
            "data: every rank reads and decodes the whole stream and keeps its part. With %s of datasets.distributed "
            "it reads only its part (%d shards; best a multiple of %d), but can then resume with %d such parts only.",
            hugging_face.how_to_split(world_size, control.start().world_size),
            dataset.num_shards,
            world_size,
            world_size,
        )


def _without_ranks(user_sampler: Any, dataset: Any) -> Any:
    """The sampler of the whole order: torch's DistributedSampler is replaced by the sampler that it shards, so that the
    order is known and nothing is padded twice."""
    if sampler.ranked_part(user_sampler) is not None:
        log.info(
            f"data: {type(user_sampler).__name__} already shards over ranks; shardkit shards its whole order instead."
        )
    if type(user_sampler) is not DistributedSampler:
        return user_sampler
    return RandomSampler(dataset) if user_sampler.shuffle else SequentialSampler(dataset)


def _first_of(order: sampler.Indexed | Drawn) -> list[str]:
    """Digests of the first items, of a drawn order as far as it has been read."""
    if isinstance(order, Drawn):
        return fields_of(order.first)
    return fields_of(order.items(torch.arange(min(COMPARED, order.length), device="cpu")))


def _seed_of_rank(seed: int, epoch: int, rank: int) -> int:
    """The seed of a rank's workers in an epoch: different on every rank."""
    return stream_seed(stream_seed(seed, epoch), rank)


class CurrentIndices(Sampler):
    """The sampler of the rebuilt DataLoader: the indices of the current epoch."""

    def __init__(self, loader: DataLoader) -> None:
        self._is_batched = loader.batch_sampler is not None
        self.yields_lists = batch_sampler_of(loader) is not None
        self.current: Iterator[Any] = iter(())

    def as_argument(self) -> dict[str, Any]:
        """The DataLoader arguments: it replaces the batch sampler, or the sampler where the loader does not batch."""
        return {"batch_sampler": self} if self._is_batched else {"batch_size": None, "sampler": self}

    def __iter__(self) -> Iterator[Any]:
        return self.current

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "current": iter(())}


def _warn_of_another_order(name: str, begins: list[str], saved: list[str] | None) -> None:
    """`saved`: how the epoch began when the position was saved, as far as the sampler had been read."""
    if any(now != before for now, before in zip(begins, saved or (), strict=False)):
        log.warning(
            f"data: {name} yields another order than when the position was saved, so samples of this epoch are "
            "repeated and others left out; seed its generator by the epoch, in set_epoch(epoch), not once for all."
        )


def _refuse_own_end(loader: DataLoader) -> None:
    """UsageError where the loader's own iteration ends its epochs: read without it, the first would never end."""
    batches = batch_sampler_of(loader)
    if batches is None or sampler.length_of(loader) is None or sampler.length_of(batches) is not None:
        return
    raise UsageError(
        f"prepare: {type(loader).__name__} ends its epochs by itself (got a batch sampler without a length, "
        f"{type(batches).__name__}); use a torch DataLoader: with persistent_workers=True its workers are kept as well."
    )


def _rebuilt(loader: DataLoader, dataset: Any = None, **changes: Any) -> DataLoader:
    """The user's DataLoader with `changes`. Its workers are seeded from a private generator, so that starting an epoch
    draws nothing from the global one."""
    own = [
        name for name in ("__iter__", "_get_iterator") if getattr(type(loader), name) is not getattr(DataLoader, name)
    ]
    if own:
        _refuse_own_end(loader)
        log.warning(
            f"data: {type(loader).__name__} overrides {own[0]}, which is not used: its dataset is read by a "
            "torch DataLoader with the same sampler, collate_fn and workers."
        )
    if not loader.in_order:
        log.info("data: in_order=False is ignored: batches come in order, or a resumed run would lose some.")
    same = ("num_workers", "collate_fn", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    kept = {name: getattr(loader, name) for name in same}
    kept["pin_memory"] = loader.pin_memory and torch.accelerator.is_available()
    start = StartWorker(loader.worker_init_fn) if loader.num_workers else None
    kept |= {"worker_init_fn": start, "generator": torch.Generator(), **changes}
    return DataLoader(loader.dataset if dataset is None else dataset, **kept)
