"""The API of `accelerate.data_loader`: prepared loaders and samplers."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from shardkit.compat.states import PartialState
from shardkit.data import preparing as data
from shardkit.data import skipping
from shardkit.data.loader import PreparedLoader
from shardkit.errors import UsageError
from shardkit.runtime.forwarding import Forwarding


class _Prepared(type):
    """A metaclass that makes every prepared loader an instance of its classes, for isinstance checks in scripts."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, PreparedLoader) or type(value) is Rest


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


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """As shardkit's; but the length is that of the rest, as with Accelerate: loops compare the step with it."""
    loader = dataloader.loader if type(dataloader) is Rest else dataloader
    found = skipping.skip_first_batches(loader, num_batches)
    return Rest(found, num_batches) if num_batches and isinstance(found, PreparedLoader) else found


class Rest(Forwarding):
    """A prepared loader that skips its first batches in the next iteration."""

    _inside = "loader"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for `isinstance(loader, DataLoader)`
        return self.loader.__class__

    def __init__(self, loader: PreparedLoader, skipped: int) -> None:
        self._skipped = skipped
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self._skipped)


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


def _refuse_parts(name: str, batch_size: int | None, ranks: int) -> None:
    """UsageError where batches of this size cannot be split into equal parts."""
    if batch_size is None or batch_size % ranks:
        raise UsageError(
            f"{name}(split_batches=True): the batch size must be a multiple of the number of ranks (got {batch_size} "
            f"for {ranks}); change it, or leave split_batches out."
        )


class SkipBatchSampler(BatchSampler):
    """The batches of a batch sampler, or the indices of a sampler, without the first `skip_batches` ones."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    @property
    def total_length(self) -> int:
        """The length with those that are skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.skip_batches

    def __iter__(self) -> Iterator[Any]:
        return islice(self.batch_sampler, self.skip_batches, None)


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
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            _refuse_parts("BatchSamplerShard", self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """The number of batches of all ranks."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        if self.split_batches:
            return len(self.batch_sampler)
        rounds, rest = divmod(len(self.batch_sampler), self.num_processes)
        has_one_more = rest > (0 if self.even_batches else self.process_index)
        return rounds + (has_one_more and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        batches = [list(one) for one in self.batch_sampler]
        return iter(self._parts(batches) if self.split_batches else self._whole(batches))

    def _whole(self, batches: list[list[int]]) -> list[list[int]]:
        ranks = self.num_processes
        if self.drop_last:
            batches = batches[: len(batches) // ranks * ranks]
        elif self.even_batches and batches:
            batches = self._filled(batches)
        return batches[self.process_index :: ranks]

    def _filled(self, batches: list[list[int]]) -> list[list[int]]:
        """The batches, padded with the first samples so that all ranks have equally many batches of the full size; with
        the first batches where these have no one size."""
        size, missing = self.batch_size, -len(batches) % self.num_processes
        if size is None:
            return batches + (batches * self.num_processes)[:missing]
        flat = [sample for batch in batches for sample in batch]
        wanted = (len(batches) + missing) * size
        flat = [flat[number % len(flat)] for number in range(wanted)]
        return [flat[start : start + size] for start in range(0, wanted, size)]

    def _parts(self, batches: list[list[int]]) -> list[list[int]]:
        size = self.batch_size
        begin = size // self.num_processes * self.process_index
        end, mine = begin + size // self.num_processes, []
        for batch in batches:
            if len(batch) < size and self.drop_last:
                continue
            if self.even_batches:
                filling = [batches[0][number % len(batches[0])] for number in range(size - len(batch))]
                batch = batch + filling
            if piece := batch[begin:end]:
                mine.append(piece)
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
        if split_batches and batch_size > 1:
            _refuse_parts("IterableDatasetShard", batch_size, num_processes)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = num_processes, process_index, split_batches
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the dataset if it has `set_epoch`."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of samples of this rank. TypeError if the dataset has no length."""
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        samples = len(self.dataset)  # type: ignore[arg-type]
        groups = samples // whole if self.drop_last else -(-samples // whole)
        return groups * whole // self.num_processes

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)  # the same order on all ranks
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
