"""Iterable datasets: every rank and every DataLoader worker reads the whole stream and keeps its own slices."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, get_worker_info

from shardkit.data import hugging_face
from shardkit.data.first_items import KEPT, are_different, begin_differently, beginning_of, fields_of, is_beginning
from shardkit.data.private_random import PrivateRandom
from shardkit.data.sampler import items_of
from shardkit.data.shares import BatchLayout, split
from shardkit.data.stream_state import OwnState
from shardkit.distributed import control
from shardkit.distributed.seed import set_seed, stream_seed
from shardkit.errors import CheckpointError, UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Counted:
    """A sample, or what samples are collated to, with facts of its global batch: the number of real samples, whether it
    is padded, and the number of samples that this rank has of it."""

    value: Any
    samples: int
    is_padded: bool
    of_rank: int = 0
    problem: str | None = None
    """Why the batch cannot be split over ranks; there is no value then."""
    first: list[str] | None = None
    """For the first that a process yields: digests of the fields of the first global batch that it has read, to compare
    ranks and workers."""
    beginning: str | None = None
    """With it: digests of the first items of the epoch, where it was read from its start."""

    def pin_memory(self, device: Any = None) -> "Counted":
        """Called by DataLoader where pin_memory is on."""
        return replace(self, value=_pinned(self.value, device))

    def batch(self, is_pinned: bool) -> Any:
        """What the loop is given; collated now if it is yet to be."""
        if not isinstance(self.value, Uncollated):
            return self.value
        batch = self.value.collate(self.value.samples)
        return _pinned(batch) if is_pinned else batch


@dataclass(frozen=True)
class Uncollated:
    """A batch that is collated when the loop is given it."""

    collate: Callable[[Any], Any]
    samples: Any


def _pinned(value: Any, device: Any = None) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(value, device)


@dataclass(frozen=True)
class CountingCollate:
    """The user's collate function, applied to samples with their facts. `is_batched` is False where the dataset yields
    whole batches.

    Without workers it is called when the loop is given the batch, not when the stream is read ahead: it may draw random
    numbers, and these are then as the loop without shardkit draws them, and the same after a resume.
    """

    collate: Callable[[Any], Any]
    is_batched: bool

    def __call__(self, given: Any) -> Counted:
        first: Counted = given[0] if self.is_batched else given
        if first.problem:
            return first
        samples = [one.value for one in given] if self.is_batched else given.value
        is_in_worker = get_worker_info() is not None
        return replace(first, value=self.collate(samples) if is_in_worker else Uncollated(self.collate, samples))


class Start(NamedTuple):
    """Where an iteration over a stream starts: numbers for one tensor, the seeds below 2**63."""

    seed: int
    """For the dataset's random draws in this epoch."""
    seed_of_rank: int
    """For those of collating in workers."""
    epoch: int
    samples: int
    is_moved: bool
    """Whether the position does not follow the last iteration, so that the dataset is reset to its beginning."""
    may_exceed: bool
    """As in `Position`."""


class Stream(IterableDataset):
    """One rank's slices of an iterable dataset, from the position set by `start_at`.

    The stream is read in chunks of a global batch. With n workers, each reads the whole stream and keeps every n-th
    chunk. The dataset does not see the workers (get_worker_info() is None), so one that splits itself over workers
    yields the whole stream, and nothing is read twice or skipped. Its random draws come from generators seeded with
    (seed, epoch), the same on every rank and worker.
    """

    def __init__(self, dataset: Any, layout: BatchLayout, has_batches: bool = False) -> None:
        """`has_batches`: the dataset yields whole batches."""
        self.dataset = dataset
        self.layout = layout
        self._has_batches = has_batches
        self._own_state = OwnState(dataset)
        self.is_compared = getattr(dataset, "split_by_rank", None) is not False
        self._is_told = self.is_compared and split_of(dataset) is None
        self.saved: Any = None
        """A snapshot to start from instead of skipping; only without workers."""
        self.snapshot: Any = None
        """The dataset's own state after the newest chunk; only without workers."""
        self.beginning: str | None = None
        """As `Counted.beginning`, of the newest loop; of the position where it starts, before its first batch."""
        self._beginning_skipped: str | None = None
        """As `beginning`, where this process has read the first items without yielding them."""
        self._start = torch.zeros(len(Start._fields), dtype=torch.int64, device="cpu")
        self._is_start_shared = self._is_inside = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def share_start(self) -> None:
        """Puts what `start_at` sets into shared memory, where persistent workers see the new values."""
        self._start.share_memory_()
        self._is_start_shared = True

    def start_from(self, state: Any, samples: int) -> None:
        """The next iteration starts from what a position has kept: the dataset's own state, or how the epoch began."""
        self.beginning, self.saved = (state, None) if is_beginning(state) else (None, state)
        if samples and self.saved is None:
            log.info(f"data: skipping {samples:,} samples of the stream to reach the saved position.")

    def state(self) -> Any:
        """What a position keeps."""
        return self.beginning if self.snapshot is None else self.snapshot

    def of_one_loop(self, is_inside: bool) -> "Stream":
        """The stream for one loop, maybe inside another: it does not see where later loops start."""
        own = copy(self)
        own._is_start_shared, own._is_inside = False, is_inside
        return own

    def start_at(self, start: Start) -> None:
        """Sets where the next iteration starts."""
        if self._is_start_shared:
            self._start.copy_(torch.tensor(start, device="cpu"))
        else:
            self._start = torch.tensor(start, device="cpu")  # a new one: workers may be yet to read an earlier one
        self._tell_epoch(start.epoch)

    def _tell_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Counted]:
        start, worker = Start(*self._start.tolist()), get_worker_info()
        number_of_workers, own_number = (worker.num_workers, worker.id) if worker else (1, 0)
        if worker is not None and not hugging_face.is_stream(self.dataset):
            # Persistent workers have their own copies. Those of Hugging Face share the epoch number: it is already set.
            self._tell_epoch(start.epoch)
        is_compared, first = self.is_compared and (self.layout.world_size > 1 or number_of_workers > 1), None
        for number, chunk in enumerate(self._chunks(start, is_worker=worker is not None)):
            if number == 0:
                first = fields_of(chunk) if is_compared else None
                beginning = beginning_of(chunk) if start.samples == 0 and self._is_told else self._beginning_skipped
            if number % number_of_workers != own_number:
                continue
            if worker is not None:  # as for a map-style dataset's batches
                set_seed(stream_seed(start.seed_of_rank, start.samples + number * self.layout.global_batch))
            yield from self._own(chunk, first, beginning)
            first = beginning = None

    def _own(self, chunk: list[Any], first: list[str] | None, beginning: str | None) -> Iterator[Counted]:
        """This rank's slice of a global batch."""
        try:
            part, is_padded = split(chunk, self.layout, spare=chunk)
        except UsageError as error:  # raised when the loop gets there: workers may be ahead of it
            yield Counted(None, len(chunk), False, problem=str(error))
            return
        for value in part:
            yield Counted(value, len(chunk), is_padded, len(part), first=first, beginning=beginning)

    def _chunks(self, start: Start, is_worker: bool) -> Iterator[list[Any]]:
        """From the position on: by the saved state, which is used once, or by skipping.

        Workers skip: most are created again for every epoch, and would always find the state that they started from.
        """
        own, size, randomness = self._own_state, self.layout.global_batch, PrivateRandom(start.seed)
        saved, self.saved, self._beginning_skipped = (None if is_worker else self.saved), None, None
        with randomness, _no_workers():
            reading = own.begin(saved, start.is_moved, self._is_inside, is_worker)
            is_there = own.is_kept and saved is not None
            source = self._items() if is_there else self._skipped(start)
        try:
            while True:
                with randomness, _no_workers():
                    if own.is_elsewhere(reading):
                        del source  # what its end does to the dataset comes before the state
                        self._tell_epoch(start.epoch)
                        own.put_back(reading)
                        source = self._items()
                    chunk = list(islice(source, size))
                reading.was_left = len(chunk) == size
                if not chunk or (len(chunk) < size and self.layout.drop_last):
                    return
                if own.is_kept and not is_worker:
                    own.note(reading)
                    self.snapshot = reading.state
                yield chunk
        finally:
            own.end(reading)

    def _items(self) -> Iterator[Any]:
        items = items_of(self.dataset)
        return _unchanged(items, type(self.dataset).__name__) if self._has_batches else items

    def _skipped(self, start: Start) -> Iterator[Any]:
        """The dataset's iterator, past the samples before the start."""
        source = self._items()
        first = list(islice(source, min(start.samples, KEPT)))
        self._beginning_skipped = beginning_of(first) if first and self._is_told else None
        skipped = len(first) + sum(1 for _ in islice(source, start.samples - len(first)))
        if skipped < start.samples and not start.may_exceed:
            raise CheckpointError(
                f"data: the stream of {type(self.dataset).__name__} ended after {skipped:,} samples, before the "
                f"position to begin at (got {start.samples:,}); use the data that the checkpoint was made with, or "
                "skip fewer batches."
            )
        return source


def _unchanged(items: Iterator[Any], dataset: str) -> Iterator[Any]:
    """The items. UsageError where the dataset then fills the memory of one again: the loop is yet to be given it."""
    yielded: list[tuple[torch.Tensor, int]] = []
    for item in items:
        if any(tensor._version != version for tensor, version in yielded):
            raise UsageError(
                f"data: {dataset} changes a batch after it has yielded it (got a tensor that it fills again), and "
                "batches are read ahead; yield a new tensor each time, such as buffer.clone()."
            )
        tensors = (leaf for leaf in tree_leaves(item) if isinstance(leaf, torch.Tensor))
        yielded = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        yield item


@contextmanager
def _no_workers() -> Iterator[None]:
    """Inside, get_worker_info() returns None."""
    module: Any = sys.modules["torch.utils.data._utils.worker"]
    found = module._worker_info
    module._worker_info = None
    try:
        yield
    finally:
        module._worker_info = found


def compared(batches: Iterable[Counted], stream: Stream) -> Iterator[Counted]:
    """The batches. Warns where workers have read different streams, and where the epoch began otherwise than when the
    position that it starts from was saved."""
    known: list[str] | None = None
    for batch in batches:
        if batch.first is not None:
            known = known or batch.first
            if are_different([known, batch.first]):
                _warn_of_workers()
        if batch.beginning is not None:
            before = stream.beginning if stream.layout.rank == 0 else None
            if before is not None and begin_differently(batch.beginning, before):
                _warn_of_another_stream(type(stream.dataset).__name__)
            stream.beginning = batch.beginning
        yield batch


@cache
def _warn_of_another_stream(name: str) -> None:
    log.warning(
        "data: %s yields other samples than when the position was saved, so samples of this epoch are repeated and "
        "others left out; seed its random generator by the epoch, in set_epoch(epoch), not once for all, or keep it in "
        "state_dict(). If they only look different, give the dataset the attribute split_by_rank = False.",
        name,
    )


@cache
def _warn_of_workers() -> None:
    log.warning(
        "data: the workers of a loader read different streams, and each keeps every n-th batch of its own, so samples "
        "are lost; let each read the whole stream (a worker_init_fn need not split it). If they only look different, "
        "give the dataset the attribute split_by_rank = False."
    )


def split_of(dataset: Any) -> tuple[int, int] | None:
    """(rank, world size) of a dataset that is already split by rank; None where it yields the whole stream.

    A Hugging Face stream after `split_dataset_by_node`, or any dataset with an attribute `split_by_rank`.
    """
    return getattr(dataset, "split_by_rank", None) or hugging_face.split_of(dataset)


def end_together(
    own: Iterator[tuple[Item, bool]], samples_of: Callable[[Item], int], parts: int
) -> Iterator[tuple[Item, bool, int]]:
    """Every value of this rank, whether the epoch ends with it, and the sum of all parts' samples. Ranks that share
    each sequence read the same part.

    `own` says whether a value is this rank's last. The epoch ends on all ranks as soon as one rank is at its last
    value; else ranks would wait for one without a batch. Collective, one value ahead, so that no rank waits for the
    result.
    """
    everyone = control.start()

    def ask(found: tuple[Item, bool] | None) -> Callable[[], list[int]]:
        is_last, samples = (True, 0) if found is None else (found[1], samples_of(found[0]))
        return everyone.sum_later([is_last, found is None, samples])

    found = next(own, None)
    answer, ended = ask(found), 0
    while not ended:
        ended, without, samples = answer()
        if found is None or without:
            ended = without
            break
        value = found[0]
        if not ended:
            found = next(own)
            answer = ask(found)
        yield value, bool(ended), samples * parts // everyone.world_size
    if ended < everyone.world_size and everyone.rank == 0:
        log.warning(
            "data: the ranks' parts of the stream have different lengths: %d of %d are at their end, and the epoch "
            "ends there on all ranks; the rest of the other parts is not read.",
            ended,
            everyone.world_size,
        )
