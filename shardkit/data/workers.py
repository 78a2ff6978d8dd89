"""DataLoader workers: they ignore stop signals, end with their rank, and seed the random draws of each batch."""

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from shardkit.distributed.seed import set_seed
from shardkit.launch import signals

_ITERATORS: "weakref.WeakSet[Any]" = weakref.WeakSet()
_SERVING: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Those with persistent workers from which a loop is reading."""


@atexit.register  # runs before multiprocessing's function, which was registered earlier and kills the workers
def _expect_the_end_of_workers() -> None:
    """For loops that end before their epoch: torch would report the workers that Python ends at exit as failed."""
    for iterator in _ITERATORS:
        if iterator._worker_pids_set:
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False


class StartWorker:
    """The worker_init_fn: the worker ignores stop signals, since its rank still has to save."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker: int) -> None:
        for number in signals.OF_RANKS:
            signal.signal(number, signal.SIG_IGN)
        if self._user_init is not None:
            self._user_init(worker)


def of_one_loop(loader: DataLoader, **own: Any) -> DataLoader:
    """The loader for a loop that begins: a copy with the attributes in `own`. With persistent workers it is the loader
    itself, unless another loop is reading from them, which can serve only one: the copy has workers of its own."""
    if loader.persistent_workers and getattr(loader, "_iterator", None) not in _SERVING:
        return loader
    beside = copy(loader)
    vars(beside).update(own, persistent_workers=False, _iterator=None)
    return beside


def batches_of(loader: DataLoader) -> Iterator[Any]:
    """The loader's batches, from workers that ignore stop signals."""
    iterator = _iterator(loader)
    if not loader.persistent_workers:
        yield from iterator
        return
    _SERVING.add(iterator)
    try:
        yield from iterator
    finally:
        _SERVING.discard(iterator)


def _iterator(loader: DataLoader) -> Iterator[Any]:
    if not loader.num_workers:
        return _begun(loader)
    # Workers inherit the mask, so that no signal kills one before StartWorker has run.
    found = signal.pthread_sigmask(signal.SIG_BLOCK, signals.OF_RANKS)
    try:
        iterator: Any = _begun(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)
    for worker in iterator._workers:
        # torch (for workers that do not answer) and Python (at exit) send SIGTERM and wait; the workers ignore it.
        worker._popen.terminate = worker._popen.kill
    _ITERATORS.add(iterator)
    return iterator


def _begun(loader: DataLoader) -> Any:
    """The loader's iterator. It draws from the loader's generator, one for host memory; torch would draw on
    the script's default device (`torch.set_default_device`). Workers make their tensors in host memory, too."""
    if torch.get_default_device().type == "cpu":
        return iter(loader)  # forked workers would inherit the context, and each operation there take longer
    with torch.device("cpu"):
        return iter(loader)


class Indices(list):
    """The indices of a batch. On arrival in a worker they seed the random generators, so that the draws belong to the
    batch: different on every rank, and the same with and without a resume."""

    seed = 0

    def __reduce__(self) -> Any:
        return _arrived, (list(self), self.seed)


def _arrived(indices: list[Any], seed: int) -> list[Any]:
    if get_worker_info() is not None:
        set_seed(seed)
    return indices
