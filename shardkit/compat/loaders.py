"""The API of `accelerate.data_loader`: prepared loaders and samplers."""

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from shardkit.compat.states import PartialState
from shardkit.data import loader as data
from shardkit.data.loader import PreparedLoader


class _Prepared(type):
    """A metaclass that makes every prepared loader an instance of its classes, for isinstance checks in scripts."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, PreparedLoader)


class DataLoaderShard(metaclass=_Prepared):
    """Accelerate's name for a prepared loader, for isinstance checks."""


class DataLoaderDispatcher(metaclass=_Prepared):
    """Accelerate's name for a prepared loader, for isinstance checks."""


def prepare_data_loader(
    dataloader: DataLoader,
    device: Any = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """The loader, which yields this rank's part of the data. Collective."""
    state = PartialState()
    return data.prepare_loader(
        dataloader,
        state.process_index if process_index is None else process_index,
        state.num_processes if num_processes is None else num_processes,
        (state.device if device is None else torch.device(device)) if put_on_device else None,
        data_seed,
        split_batches=split_batches,
        even_batches=even_batches,
    )


def get_sampler(dataloader: Any) -> Any:
    """The sampler of a loader (not its batch sampler)."""
    sampler = getattr(dataloader, "batch_sampler", None)
    while isinstance(inner := getattr(sampler, "batch_sampler", None), BatchSampler):
        sampler = inner
    return getattr(sampler, "sampler", None) or getattr(dataloader, "sampler", None)


class SeedableRandomSampler(RandomSampler):
    """A random order that is a function of (seed, epoch)."""

    def __init__(self, *args: Any, data_seed: int | None = None, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """A rank's batches of a batch sampler: batch i of rank r is batch i x ranks + r, or its part of batch i with
    `split_batches`. With `even_batches` the last batches are padded with the first samples."""

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", 0)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """The number of batches of all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self._mine())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._mine())

    def _mine(self) -> list[list[int]]:
        batches, ranks = [list(one) for one in self.batch_sampler], self.num_processes
        if self.split_batches:
            return self._split(batches)
        size = max((len(one) for one in batches), default=0)
        first = [sample for batch in batches for sample in batch]
        if self.drop_last:
            batches = batches[: len(batches) // ranks * ranks]
        elif self.even_batches and batches:
            batches = self._filled(batches, size, first)
        return batches[self.process_index :: ranks]

    def _filled(self, batches: list[list[int]], size: int, first: list[int]) -> list[list[int]]:
        """The batches, padded with the first samples so that all ranks have equally many batches of the full size."""
        wanted = -(-len(batches) // self.num_processes) * self.num_processes * size
        flat = [sample for batch in batches for sample in batch]
        while len(flat) < wanted:
            flat += first[: wanted - len(flat)]
        return [flat[start : start + size] for start in range(0, wanted, size)]

    def _split(self, batches: list[list[int]]) -> list[list[int]]:
        size = max((len(one) for one in batches), default=0)
        part = size // self.num_processes
        first, mine = [sample for batch in batches for sample in batch], []
        for batch in batches:
            if len(batch) < size and self.drop_last:
                continue
            while self.even_batches and len(batch) < size:
                batch = batch + first[: size - len(batch)]
            piece = batch[part * self.process_index : part * (self.process_index + 1)]
            mine += [piece] if piece else []
        return mine


class IterableDatasetShard(IterableDataset):
    """This rank's samples of an iterable dataset: its part of each group of batch_size x ranks samples."""

    def __init__(
        self,
        dataset: IterableDataset,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = num_processes, process_index, split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the dataset if it has `set_epoch`."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of samples of this rank."""
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        assert isinstance(self.dataset, Sized)
        groups = len(self.dataset) // whole if self.drop_last else -(-len(self.dataset) // whole)
        return groups * whole // self.num_processes

    def __iter__(self) -> Iterator[Any]:
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        part = whole // self.num_processes
        mine = slice(self.process_index * part, (self.process_index + 1) * part)
        first: list[Any] = []
        group: list[Any] = []
        for sample in self.dataset:
            group.append(sample)
            if len(group) == whole:
                yield from group[mine]
                first, group = first or group, []
        if group and not self.drop_last:
            first = first or list(group)
            while len(group) < whole:
                group += first[: whole - len(group)]
            yield from group[mine]
