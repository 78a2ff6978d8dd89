"""Which samples each rank reads: functions of the epoch's order, the position in it, the rank and the world size.

An epoch's order is drawn once for all ranks, from (seed, epoch) alone. It is read in global batches, and every rank
takes its slice of each, so that n ranks together read what one process would, in the same order. The position is
counted in samples of that order, not in batches: it means the same on any number of ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from shardkit.data.private_random import PrivateRandom, stream_seed
from shardkit.errors import ShardkitError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch; `samples` counts the real ones of the whole batch, padding left out."""

    items: list[Any]
    samples: int
    is_padded: bool


def draw(sampler: Any, seed: int, epoch: int) -> Sequence[Any]:
    """What a sampler (or a batch sampler) yields in one epoch, for all ranks together; a function of (seed, epoch)."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _permutation(sampler.num_samples, stream_seed(seed, epoch))
    with PrivateRandom(stream_seed(seed, epoch)), _generator_of(sampler, stream_seed(seed, epoch)):
        return _of_all_ranks(sampler) if is_rank_aware(sampler) else list(sampler)


def _permutation(length: int, seed: int) -> Sequence[int]:
    """A tensor: 8 bytes a sample, where a list of ints takes 40."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed))  # type: ignore[return-value]


@contextmanager
def _generator_of(sampler: Any, seed: int) -> Iterator[None]:
    """The sampler, and one inside a batch sampler, draws from a generator of this epoch's own."""
    holders: list[Any] = [s for s in (sampler, getattr(sampler, "sampler", None)) if hasattr(s, "generator")]
    found = [holder.generator for holder in holders]
    for holder in holders:
        holder.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        for holder, generator in zip(holders, found, strict=True):
            holder.generator = generator


def is_rank_aware(sampler: Any) -> bool:
    """Whether a sampler already yields one rank's share, as DistributedSampler does."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def is_plain_distributed(sampler: Any) -> bool:
    """Whether it is torch's own DistributedSampler: its order is known, so it is replaced and nothing padded twice."""
    return type(sampler) is DistributedSampler


def _of_all_ranks(sampler: Any) -> list[Any]:
    """The order behind a rank-aware sampler: every rank's share, asked for in turn and dealt out again."""
    found, shares = sampler.rank, []
    try:
        for rank in range(sampler.num_replicas):
            sampler.rank = rank
            shares.append(list(sampler))
    finally:
        sampler.rank = found
    if len(shares) > 1 and shares[0] and all(share == shares[0] for share in shares):
        raise ShardkitError(
            f"data: {type(sampler).__name__} yields one rank's share and does not tell the others' (its rank is fixed "
            "when it is made); hand over a loader with an ordinary sampler, shardkit shards it."
        )
    longest = max(map(len, shares), default=0)
    return [share[i] for i in range(longest) for share in shares if i < len(share)]


def items(order: Sequence[Item], first: int, last: int) -> list[Item]:
    """A slice of an order as a list."""
    part = order[first:last]
    return part.tolist() if isinstance(part, torch.Tensor) else list(part)


def split(
    samples: list[Item], rank: int, world_size: int, even: bool, spare: Sequence[Item]
) -> tuple[list[Item], bool]:
    """One rank's contiguous part of a global batch, and whether it was padded.

    `even`: every rank gets as many; what is missing to that (fewer than world_size samples) is taken from `spare`,
    from its start and round again. Otherwise parts differ by at most one sample, and may be empty.
    """
    each, left = divmod(len(samples), world_size)
    if not left:
        return samples[rank * each : (rank + 1) * each], False
    if not even:
        first = rank * each + min(rank, left)
        return samples[first : first + each + (rank < left)], False
    missing = world_size - left
    padded = samples + [items(spare, i % len(spare), i % len(spare) + 1)[0] for i in range(missing)]
    return padded[rank * (each + 1) : (rank + 1) * (each + 1)], True


@dataclass(frozen=True)
class Layout:
    """How global batches are cut. `global_batch` counts samples, for a custom batch sampler its batches."""

    rank: int
    world_size: int
    global_batch: int
    drop_last: bool
    even: bool


def shares_of_samples(order: Sequence[Any], start: int, layout: Layout) -> Iterator[Share]:
    """This rank's share of every global batch from position `start` (in samples) to the end of the epoch."""
    for first in range(start, len(order), layout.global_batch):
        samples = items(order, first, first + layout.global_batch)
        if len(samples) < layout.global_batch and layout.drop_last:
            return
        part, is_padded = split(samples, layout.rank, layout.world_size, layout.even, order)
        if part:
            yield Share(part, len(samples), is_padded)


def shares_of_batches(batches: Sequence[list[Any]], start: int, layout: Layout) -> Iterator[Share]:
    """The same for a custom batch sampler: a global batch is world_size of its batches, one for each rank."""
    remaining = _batches_from(batches, start)
    for first in range(0, len(remaining), layout.global_batch):
        group = remaining[first : first + layout.global_batch]
        if len(group) < layout.global_batch and layout.drop_last:
            return
        part, is_padded = split(group, layout.rank, layout.world_size, layout.even, batches)
        if part:
            yield Share(list(part[0]), sum(map(len, group)), is_padded)


def shares_of_each_batch(batches: Sequence[list[Any]], start: int, layout: Layout) -> Iterator[Share]:
    """The same with split_batches: every batch of the batch sampler is a global one, and is split."""
    remaining = _batches_from(batches, start)
    for number, batch in enumerate(remaining):
        if len(batch) % layout.world_size and number < len(remaining) - 1:
            raise ShardkitError(
                f"data: split_batches: the batch sampler yields a batch that {layout.world_size} ranks cannot split "
                f"evenly (got {len(batch)} samples); make its batches multiples of the number of ranks."
            )
        part, is_padded = split(list(batch), layout.rank, layout.world_size, layout.even, batch)
        if part:
            yield Share(part, len(batch), is_padded)


def _batches_from(batches: Sequence[list[Any]], start: int) -> list[list[Any]]:
    """The batches after the first `start` samples; of one that straddles the position, its rest."""
    remaining = []
    for batch in batches:
        if start < len(batch):
            remaining.append(list(batch)[start:])
        start = max(0, start - len(batch))
    return remaining


def with_last(values: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Every value, with whether it is the last one: reads one ahead."""
    iterator = iter(values)
    try:
        value = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield value, False
        value = following
    yield value, True
