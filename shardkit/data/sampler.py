"""The order of an epoch: the samples or batches that a sampler yields for all ranks; a function of (seed, epoch).

indexed(sampler, ...) -> Indexed     random access to any position: torch's own samplers
Drawn(sampler, ...)                  custom samplers, read only as far as needed
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from shardkit.data.first_items import COMPARED
from shardkit.data.permutation import Permutation
from shardkit.data.private_random import PrivateRandom
from shardkit.distributed.seed import stream_seed
from shardkit.errors import ShardkitError

COMPUTED, DRAWN_WHOLE = "feistel-1", "randperm"
ORDERS = (COMPUTED, DRAWN_WHOLE)
"""How a shuffled epoch is ordered, by the name in a saved position. Version 0.1 saved no name: it used the latter, and
an epoch begun by it is finished in that order."""

SKIPPED_AT_ONCE, BATCHES_SKIPPED_AT_ONCE = 4096, 64


@dataclass(frozen=True)
class Indexed:
    """An order that can be read from any position."""

    length: int
    items: Callable[[torch.Tensor], list[Any]]
    """The items at these positions."""


def indexed(sampler: Any, seed: int, epoch: int, order: str) -> Indexed | None:
    """The order of one of torch's own samplers; None where the sampler has to be iterated.

    Samplers with weights, with replacement or of a subset give torch's order for a generator seeded with (seed, epoch).
    """
    own_seed, kind = stream_seed(seed, epoch), type(sampler)
    if kind is SequentialSampler:
        return Indexed(len(sampler), torch.Tensor.tolist)
    if kind is RandomSampler and not sampler.replacement:
        return _shuffled(len(sampler.data_source), sampler.num_samples, own_seed, order)
    if kind is SubsetRandomSampler:
        chosen = _whole_permutation(len(sampler.indices), own_seed)
        return Indexed(len(chosen), lambda at: [sampler.indices[number] for number in chosen[at].tolist()])
    if kind is WeightedRandomSampler:
        wanted = sampler.num_samples, sampler.replacement
        return _stored(torch.multinomial(sampler.weights.cpu(), *wanted, generator=_seeded(own_seed)))
    return None


def _shuffled(length: int, wanted: int, seed: int, order: str) -> Indexed | None:
    if wanted > length:
        return None
    if wanted == length and order == COMPUTED:
        permutation = Permutation(length, seed)
        return Indexed(length, lambda at: permutation.at(at).tolist())
    return _stored(_whole_permutation(length, seed)[:wanted])


def _stored(items: torch.Tensor) -> Indexed:
    """A tensor: 8 bytes per sample, where a list of ints takes 40."""
    return Indexed(len(items), lambda at: items[at].tolist())


def _whole_permutation(length: int, seed: int) -> torch.Tensor:
    return torch.randperm(length, generator=_seeded(seed), device="cpu")


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Drawn:
    """What a custom sampler or batch sampler yields in one epoch, for all ranks.

    It is read only as far as needed, so it may be infinite. It draws from private random generators, seeded with (seed,
    epoch). One that already shards over ranks is read once for every rank.
    """

    def __init__(self, sampler: Any, seed: int, epoch: int, keep: int) -> None:
        """`keep`: how many of the epoch's first items to remember, for padding."""
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        self.name = type(sampler).__name__
        self.first: list[Any] = []
        self._keep = keep
        self._ready: deque[Any] = deque()
        ranked, own_seed = ranked_part(sampler), stream_seed(seed, epoch)
        ranks = [None] if ranked is None else range(ranked.num_replicas)
        self._shares = [_Share(sampler, own_seed, ranked, rank) for rank in ranks]
        self._are_different = len(self._shares) == 1

    def take(self, count: int) -> list[Any]:
        """The next `count` items; fewer at the end."""
        while len(self._ready) < count and self._draw(count - len(self._ready)):
            pass
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def skip(self, count: int) -> int:
        """Skips `count` items; returns how many there were."""
        left = count
        while left and (items := self.take(min(left, SKIPPED_AT_ONCE))):
            left -= len(items)
        return count - left

    def skip_samples(self, count: int) -> int:
        """Skips `count` samples of items that are batches; returns how many there were. The rest of a partly skipped
        batch comes next."""
        left = count
        while left and (self._ready or self._draw(BATCHES_SKIPPED_AT_ONCE)):
            batch = list(self._ready.popleft())
            if left < len(batch):
                self._ready.appendleft(batch[left:])
            left -= min(left, len(batch))
        return count - left

    def _draw(self, count: int) -> bool:
        """Reads about `count` more items; False at the end. The ranks' shares are interleaved; the first items of each
        tell whether the sampler really yields different ones."""
        each = -(-count // len(self._shares))
        drawn = [share.take(each if self._are_different else max(each, COMPARED)) for share in self._shares]
        if not self._are_different and drawn[0]:
            self._are_different = True
            if all(share == drawn[0] for share in drawn):
                raise ShardkitError(
                    f"data: {self.name} yields the same share for every rank (its rank is fixed when it is made); use "
                    "a loader with an ordinary sampler: shardkit shards it."
                )
        more = [share[number] for number in range(max(map(len, drawn))) for share in drawn if number < len(share)]
        self.first += more[: self._keep - len(self.first)]
        self._ready += more
        return bool(more)


class _Share:
    """What a sampler yields; for one that shards over ranks, what it yields as this rank."""

    def __init__(self, sampler: Any, seed: int, ranked: Any, rank: int | None) -> None:
        self._sampler = sampler
        self._random = PrivateRandom(seed)
        holders = [one for one in (sampler, getattr(sampler, "sampler", None)) if _takes_generator(one)]
        self._own: list[tuple[Any, str, Any]] = [(holder, "generator", _seeded(seed)) for holder in holders]
        if ranked is not None:
            self._own.append((ranked, "rank", rank))
        self._iterator: Iterator[Any] | None = None

    def take(self, count: int) -> list[Any]:
        with self._random, _attributes(self._own):
            if self._iterator is None:
                self._iterator = map(_kept, items_of(self._sampler))
            return list(islice(self._iterator, count))


def _kept(item: Any) -> Any:
    """The item, as it is now: items are read ahead, and a sampler may fill one list or array again and again."""
    if isinstance(item, torch.Tensor):
        return item.clone()
    return copy(item) if hasattr(item, "__setitem__") else item


def _takes_generator(sampler: Any) -> bool:
    """Whether it has a place for one of torch's generators. Others, such as numpy's, are the sampler's own."""
    own = getattr(sampler, "generator", 0)
    return (own is None or isinstance(own, torch.Generator)) and _is_settable(sampler, "generator")


def _is_settable(holder: Any, name: str) -> bool:
    of_class = getattr(type(holder), name, None)
    return not isinstance(of_class, property) or of_class.fset is not None


def items_of(iterable: Iterable[Any]) -> Iterator[Any]:
    """What it yields, by one `iter` and then `next` alone: an object that is its own iterator may begin anew at every
    `iter`, which `for` and `islice` call."""
    iterator = iter(iterable)

    def items() -> Iterator[Any]:
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return

    return items()


@contextmanager
def _attributes(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Inside, each (object, name, value) has this value."""
    found = [(holder, name, getattr(holder, name)) for holder, name, _ in values]
    try:
        for holder, name, value in values:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in found:
            setattr(holder, name, value)


def ranked_part(sampler: Any) -> Any:
    """The sampler that already shards over ranks, as DistributedSampler does, by a rank that can be set: this one, or
    the one inside a batch sampler; None if there is none."""
    for one in (sampler, getattr(sampler, "sampler", None)):
        if hasattr(one, "num_replicas") and hasattr(one, "rank") and _is_settable(one, "rank"):
            return one
    return None


def shares_in(sampler: Any) -> int:
    """How many shares make an epoch: 1, except for a sampler that yields one rank's share."""
    ranked = ranked_part(sampler)
    return 1 if ranked is None else ranked.num_replicas


def epoch_length(sampler: Any) -> int | None:
    """The number of items in an epoch over all ranks, by the sampler's length; None where it has none."""
    own = length_of(sampler)
    return None if own is None else own * shares_in(sampler)


def length_of(sized: Any) -> int | None:
    """Its length; None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, ValueError, OverflowError):
        return None
