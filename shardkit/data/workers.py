"""DataLoader workers: they leave stop signals to their rank, end with it, and seed what each batch draws at random."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from shardkit.distributed.seed import set_seed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StartWorker:
    """What runs first in a worker: it leaves the signals that stop a run to its rank, which still has to save."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._users is not None:
            self._users(worker)


def batches_of(loader: DataLoader) -> Iterator[Any]:
    """The loader's batches, from workers that leave stop signals to this process."""
    if not loader.num_workers:
        return iter(loader)
    # Workers inherit the mask, so that none dies of a signal that comes before StartWorker has run.
    found = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        iterator: Any = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)
    for worker in iterator._workers:
        # Who ends them (torch where they do not answer, Python at exit) sends SIGTERM and waits, here for ever.
        worker._popen.terminate = worker._popen.kill
    return iterator


class Indices(list):
    """A batch's indices. Where they arrive in a worker, what its samples draw at random is seeded, so that the draws
    are the batch's own: other ones on every rank, and after a resume the same as without it."""

    seed = 0

    def __reduce__(self) -> Any:
        return _arrived, (list(self), self.seed)


def _arrived(indices: list[Any], seed: int) -> list[Any]:
    if get_worker_info() is not None:
        set_seed(seed)
    return indices
