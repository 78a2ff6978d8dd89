"""Iterable datasets: every rank, and every DataLoader worker, reads the one stream and keeps its own slices of it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardkit.data.private_random import PrivateRandom, stream_seed
from shardkit.data.sampler import Layout, split
from shardkit.errors import CheckpointError

EPOCH_IS_OVER = "epoch is over"
"""Kept in place of a dataset's own state after an epoch's last batch: datasets go back to their beginning there, so
their state would say that the epoch starts anew."""


@dataclass(frozen=True)
class Slot:
    """One sample, with what the batch around it is: real samples of the whole global batch, padded or not."""

    value: Any
    samples: int
    is_padded: bool


@dataclass(frozen=True)
class Counted:
    """A batch on its way from a worker to the loop, with the same."""

    batch: Any
    samples: int
    is_padded: bool

    def pin_memory(self, device: Any = None) -> "Counted":
        """What DataLoader calls where pin_memory is on."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Counted(pin_memory(self.batch, device), self.samples, self.is_padded)


@dataclass(frozen=True)
class CountingCollate:
    """The user's collate function over slots. `is_batched` is False where the dataset yields batches itself."""

    collate: Callable[[Any], Any]
    is_batched: bool

    def __call__(self, slots: Any) -> Counted:
        first = slots[0] if self.is_batched else slots
        value = self.collate([slot.value for slot in slots] if self.is_batched else slots.value)
        return Counted(value, first.samples, first.is_padded)


class Stream(IterableDataset):
    """One rank's slices of a dataset's stream, from the position that `start_at` sets.

    The stream is read in chunks of a global batch. With several workers, each reads the whole stream and keeps every
    n-th chunk; the dataset is not told that there are workers, so one that would split itself over them yields the
    whole, and nothing is read twice or left out. Random draws of the dataset come from generators seeded with
    (seed, epoch), the same on every rank and worker.
    """

    def __init__(self, dataset: Any, layout: Layout) -> None:
        self.dataset = dataset
        self.layout = layout
        self.saved: Any = None
        """A snapshot, or EPOCH_IS_OVER, to start from instead of skipping; only without workers."""
        self.snapshot: Any = None
        """The dataset's own state after the newest chunk; only without workers."""
        # Shared memory: workers that persist over epochs see it change.
        self._position = torch.zeros(3, dtype=torch.int64).share_memory_()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def start_at(self, seed: int, epoch: int, samples: int) -> None:
        """Where the next iteration starts."""
        self._position.copy_(torch.tensor([seed, epoch, samples]))

    @property
    def keeps_state(self) -> bool:
        """Whether the dataset tells and takes its own position."""
        return hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def __iter__(self) -> Iterator[Slot]:
        seed, epoch, start = (int(value) for value in self._position)
        worker = get_worker_info()
        number_of_workers, own_number = (worker.num_workers, worker.id) if worker else (1, 0)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        for number, chunk in enumerate(self._chunks(PrivateRandom(stream_seed(seed, epoch)), start)):
            if number % number_of_workers != own_number:
                continue
            part, is_padded = split(chunk, self.layout.rank, self.layout.world_size, self.layout.even, chunk)
            for value in part:
                yield Slot(value, len(chunk), is_padded)

    def _chunks(self, randomness: PrivateRandom, start: int) -> Iterator[list[Any]]:
        size = self.layout.global_batch
        # Workers skip: most are made anew for every epoch, and would each time find the state that they started from.
        uses_state = self.keeps_state and get_worker_info() is None
        with randomness, _no_workers():
            source = self._restored() if uses_state and self.saved is not None else self._skipped(start)
        while True:
            with randomness, _no_workers():
                chunk = list(islice(source, size))
            if not chunk or (len(chunk) < size and self.layout.drop_last):
                return
            if uses_state:
                # A copy: a dataset may return the very dict that it goes on changing.
                self.snapshot = deepcopy(self.dataset.state_dict())
            yield chunk

    def _restored(self) -> Iterator[Any]:
        """The dataset's iterator, from the saved state on. The state is used up: the next epoch starts at 0."""
        saved, self.saved = self.saved, None
        if saved == EPOCH_IS_OVER:
            return iter(())
        self.dataset.load_state_dict(saved)
        return iter(self.dataset)

    def _skipped(self, start: int) -> Iterator[Any]:
        """The dataset's iterator, past the first `start` samples."""
        source = iter(self.dataset)
        skipped = sum(1 for _ in islice(source, start))
        if skipped < start:
            raise CheckpointError(
                f"data: the stream of {type(self.dataset).__name__} ended after {skipped:,} samples, before the saved "
                f"position (got {start:,}); it is not the data that the checkpoint was made with."
            )
        return source


@contextmanager
def _no_workers() -> Iterator[None]:
    """Inside, get_worker_info() says that there are none."""
    module: Any = sys.modules["torch.utils.data._utils.worker"]
    found = module._worker_info
    module._worker_info = None
    try:
        yield
    finally:
        module._worker_info = found
