"""Process control: run code on one rank first, on one rank only, or split inputs over ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from shardkit.distributed.collectives import wait_for_everyone
from shardkit.errors import UsageError
from shardkit.runtime.topology import RankNumbers


@contextmanager
def first(goes_first: bool) -> Iterator[None]:
    """Ranks with `goes_first` run the block before the others. Collective: every rank must enter it."""
    if not goes_first:
        wait_for_everyone()
    try:
        yield
    finally:
        if goes_first:
            wait_for_everyone()


def only(condition: Callable[[], bool], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called only where the condition holds at the time of the call; else the call returns None."""

    @wraps(function)
    def called(*args: Any, **arguments: Any) -> Any:
        return function(*args, **arguments) if condition() else None

    return called


def decorated(function: Callable[..., Any] | None, condition: Callable[[], bool]) -> Callable[..., Any]:
    """As `only`; without a function, a decorator."""
    if function is None:
        return lambda later: only(condition, later)
    return only(condition, function)


class ProcessControl(RankNumbers):
    """Process control methods for Accelerator and state objects, from their rank numbers."""

    def wait_for_everyone(self) -> None:
        """Barrier: returns when all ranks have called it. Collective."""
        wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Rank 0 runs the block before the others, for instance to download. Collective."""
        return first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Each machine's first rank runs the block before the others. Collective."""
        return first(self.is_local_main_process)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """A context with this rank's part of a list, tuple, str, tensor, array or dataset, or of each value of a dict.
        Parts differ in length by one at most; with `apply_padding` short ones repeat the last item, for `gather`."""
        yield part_of(inputs, self.process_index, self.num_processes, apply_padding)

    def print(self, *values: Any, **arguments: Any) -> None:
        """As `print`, on each machine's first rank only."""
        if self.is_local_main_process:
            print(*values, **arguments)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The function, called on rank 0 only: elsewhere it returns None. Also as `@accelerator.on_main_process`."""
        return decorated(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """As `on_main_process`, on each machine's first rank."""
        return decorated(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As `on_main_process`, on the last rank."""
        return decorated(function, lambda: self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """As `on_main_process`, on rank `process_index` (default 0). Where there is one rank it runs there, whatever
        the index. Also as `@accelerator.on_process(process_index=1)`."""
        index = process_index or 0
        return decorated(function, lambda: not self.use_distributed or self.process_index == index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """As `on_process`, on one rank of each machine."""
        index = local_process_index or 0
        return decorated(function, lambda: not self.use_distributed or self.local_process_index == index)


def part_of(inputs: Any, rank: int, world_size: int, apply_padding: bool = False) -> Any:
    """This rank's contiguous part of a list, tuple, str, tensor, array or dataset, or of each value of a dict.

    Where the length does not divide evenly, the first parts are longer by one. With padding, short parts repeat the
    last item, so that all can be gathered.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(
                f"split_between_processes: the values of a dict must be equally long (got {lengths}); "
                "split them in separate calls."
            )
        return {key: part_of(value, rank, world_size, apply_padding) for key, value in inputs.items()}
    if not _has_parts(inputs):
        raise UsageError(
            f"split_between_processes: takes a list, tuple, str, tensor, array or dataset, or a dict of these (got "
            f"{type(inputs).__name__}); make it a list of one item for each sample, in the same order on all ranks."
        )
    each, left = divmod(len(inputs), world_size)
    start = rank * each + min(rank, left)
    end = start + each + (rank < left)
    missing = each + bool(left) - (end - start) if apply_padding else 0
    if hasattr(inputs, "select") and hasattr(inputs, "column_names"):  # of the package datasets; slices are dicts there
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    if isinstance(inputs, Dataset):
        return Subset(inputs, [*range(start, end), *[len(inputs) - 1] * missing])  # type: ignore[arg-type]
    return _padded(inputs, start, end, missing) if missing else inputs[start:end]


def _has_parts(inputs: Any) -> bool:
    """Whether it has a length and can be sliced."""
    try:
        len(inputs)
        return isinstance(inputs, Dataset) or hasattr(inputs, "select") or inputs[:0] is not None
    except (TypeError, NotImplementedError):
        return False


def _padded(inputs: Any, start: int, end: int, missing: int) -> Any:
    """The items from start to end, and the last of all so many times."""
    if isinstance(inputs, torch.Tensor):
        return torch.cat([inputs[start:end], *[inputs[-1:]] * missing])
    indices = [*range(start, end), *[len(inputs) - 1] * missing]
    if hasattr(inputs, "take"):  # arrays of NumPy, where + adds the numbers; frames of pandas
        return inputs.take(indices, axis=0)
    if hasattr(inputs, "__add__"):  # a list, tuple or str
        return inputs[start:end] + inputs[-1:] * missing
    return [inputs[index] for index in indices]
