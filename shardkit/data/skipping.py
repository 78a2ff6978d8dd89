"""Starts an epoch of a loader after its first batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardkit.data.loader import PreparedLoader
from shardkit.errors import UsageError


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The loader; its next iteration skips the first `num_batches` batches of its epoch, also of one set after this.

    Counted from the start of the epoch. It replaces a restored position, so skipping by hand after `load_state` does
    not skip twice. A loader that is not prepared is read, and its first batches are dropped.
    """
    if not hasattr(num_batches, "__index__") or num_batches < 0:
        raise UsageError(
            f"skip_first_batches: the number of batches must be an integer of at least 0 (got {num_batches!r}); divide "
            "by //, or convert it."
        )
    if not isinstance(dataloader, PreparedLoader):
        return _Skipping(dataloader, num_batches)
    dataloader.skip_to(num_batches)
    return dataloader


@dataclass(frozen=True)
class _Skipping:
    loader: Any
    batches: int

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.batches, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.batches)
