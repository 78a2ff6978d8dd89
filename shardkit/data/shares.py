"""Which samples of a global batch each rank reads: functions of the order, the position, the rank and the world size.

An epoch has one order for all ranks. It is read in global batches, and every rank takes its slice of each, so that n
ranks together read what one process would, in the same order. The position is counted in samples of that order, not in
batches, so it is valid for any number of ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, TypeVar

import torch

from shardkit.data.position import Position
from shardkit.data.sampler import Drawn, Indexed
from shardkit.errors import CheckpointError, ShardkitError, UsageError
from shardkit.log import get_logger

Item = TypeVar("Item")

log = get_logger(__name__)

# A rank's positions are looked up in blocks: small at first, then up to this size, about a millisecond of work.
FIRST_AT_ONCE, MOST_AT_ONCE = 128, 8192


@dataclass(frozen=True)
class BatchLayout:
    """How global batches are split over ranks. `global_batch` counts samples; for a custom batch sampler, its
    batches. `even`: a batch that ranks cannot share equally is padded. `pads_the_shortest`: without `even`, only one
    of fewer samples than ranks is, which is an error otherwise."""

    rank: int
    world_size: int
    global_batch: int
    drop_last: bool
    even: bool
    pads_the_shortest: bool = False


@dataclass(frozen=True)
class Share:
    """One rank's part of one global batch; `samples` counts the samples of the whole batch without padding. `batches`:
    how many batches of a custom batch sampler form it, one for each rank; None where samples do."""

    items: Sequence[Any]
    samples: int
    is_padded: bool
    is_last: bool
    batches: int | None = None


def shares_of_indexed(order: Indexed, start: int, layout: BatchLayout) -> Iterator[Share]:
    """This rank's share of every global batch from position `start` (in samples) to the end of the epoch."""
    positions = _shares_of_positions(order.length, start, layout)
    at_once = FIRST_AT_ONCE
    while block := list(islice(positions, max(1, at_once * layout.world_size // layout.global_batch))):
        at_once = min(2 * at_once, MOST_AT_ONCE)
        wanted = torch.tensor(list(chain.from_iterable(share.items for share in block)), device="cpu")
        found = iter(order.items(wanted))
        for share in block:
            items = list(islice(found, len(share.items)))
            yield Share(items, share.samples, share.is_padded, share.is_last)


def _shares_of_positions(length: int, start: int, layout: BatchLayout) -> Iterator[Share]:
    size = layout.global_batch
    batches = number_of_batches(length - start, layout)
    for number in range(batches):
        first = start + number * size
        batch = range(first, min(first + size, length))
        part, is_padded = split(batch, layout, spare=range(length))
        yield Share(part, len(batch), is_padded, is_last=number == batches - 1)


def shares_of_drawn(order: Drawn, start: Position, layout: BatchLayout) -> Iterator[Share]:
    """The same for a custom sampler, which is read one global batch ahead."""
    _refuse_if_short(order, start, order.skip(start.samples))
    batches = iter(partial(order.take, layout.global_batch), [])
    for batch, is_last in with_last(_used(batches, layout)):
        part, is_padded = split(batch, layout, spare=order.first)
        yield Share(part, len(batch), is_padded, is_last)


def shares_of_batches(order: Drawn, start: Position, layout: BatchLayout) -> Iterator[Share]:
    """The same for a custom batch sampler: a global batch is world_size of its batches, one for each rank."""
    groups = _groups(order, start, layout.global_batch)
    for group, is_last in with_last(_used(groups, layout)):
        part, is_padded = split(group, layout, spare=order.first)
        yield Share(list(part[0]), sum(map(len, group)), is_padded, is_last, len(group))


def shares_of_each_batch(order: Drawn, start: Position, layout: BatchLayout) -> Iterator[Share]:
    """The same with split_batches: every batch of the batch sampler is a global batch, and is split."""
    for (batch,), is_last in with_last(_groups(order, start, 1)):
        if len(batch) % layout.world_size and not is_last:
            raise ShardkitError(
                f"data: split_batches: the batch sampler yields a batch that {layout.world_size} ranks cannot split "
                f"evenly (got {len(batch)} samples); make its batches multiples of the number of ranks."
            )
        part, is_padded = split(batch, layout, spare=batch)
        yield Share(part, len(batch), is_padded, is_last)


def split(samples: Sequence[Item], layout: BatchLayout, spare: Sequence[Item]) -> tuple[Sequence[Item], bool]:
    """One rank's contiguous part of a global batch, and whether it was padded.

    With `even` every rank gets equally many; the missing samples (fewer than world_size) are taken from `spare`,
    cyclically from its start. Otherwise parts differ by at most one sample; where some would be empty the batch is
    padded, or UsageError on all ranks, since a rank without a batch would miss the collectives of the others.
    """
    rank, world_size = layout.rank, layout.world_size
    each, left = divmod(len(samples), world_size)
    if not left:
        return samples[rank * each : (rank + 1) * each], False
    if not each and not layout.even and not layout.pads_the_shortest:
        raise UsageError(f"data: {uneven_text(left, world_size)}")
    if layout.pads_the_shortest and not each and rank == 0:
        log.warning("data: the last batch has fewer samples than ranks (%d for %d); it is padded.", left, world_size)
    if each and not layout.even:
        first = rank * each + min(rank, left)
        return samples[first : first + each + (rank < left)], False
    padding = [spare[number % len(spare)] for number in range(world_size - left)]
    return [*samples, *padding][rank * (each + 1) : (rank + 1) * (each + 1)], True


def uneven_text(left: int, world_size: int) -> str:
    """The error text for a last global batch that leaves some ranks without samples."""
    return (
        f"even_batches=False leaves ranks without a last batch, and the others would wait for them (got {left} for "
        f"{world_size} ranks); use drop_last=True, even_batches=True or another batch size."
    )


def number_of_batches(samples: int, layout: BatchLayout) -> int:
    """Global batches in so many samples; none in a negative number, which is a position after the end."""
    size = layout.global_batch
    return max(0, samples // size if layout.drop_last else -(-samples // size))


def _groups(order: Drawn, start: Position, size: int) -> Iterator[list[Sequence[Any]]]:
    """Groups of `size` batches, after the first `start` samples; the rest of a batch that contains the position comes
    first."""
    _refuse_if_short(order, start, order.skip_samples(start.samples))
    yield from iter(partial(order.take, size), [])


def _refuse_if_short(order: Drawn, start: Position, skipped: int) -> None:
    if skipped < start.samples and not start.may_exceed:
        raise CheckpointError(
            f"data: {order.name} ended after {skipped:,} samples, before the saved position (got {start.samples:,}); "
            "it is not the sampler that the checkpoint was made with."
        )


def _used(groups: Iterable[Sequence[Item]], layout: BatchLayout) -> Iterable[Sequence[Item]]:
    """All groups, with drop_last those before the first one that is short."""
    return takewhile(lambda group: len(group) >= layout.global_batch, groups) if layout.drop_last else groups


def with_last(values: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Every value, and whether it is the last one. Reads one ahead."""
    iterator = iter(values)
    try:
        value = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield value, False
        value = following
    yield value, True
