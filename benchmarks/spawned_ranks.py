"""Benchmarks whose ranks are children of one process: CPU ranks with gloo, one thread each."""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import interleaved

Measure = Callable[[argparse.Namespace], dict[str, list[float]]]
"""Seconds by contestant and round; the first contestant is compared with the others. Collective."""


def main(what: str, description: str, defaults: Mapping[str, int], measure: Measure) -> None:
    """Read the numbers from the command line, measure on so many `ranks`, print a table, write JSON where it is asked
    for. `what` names a turn in both."""

    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=interleaved.writable)
    options = parser.parse_args()
    torch.multiprocessing.spawn(_rank, (what, options, measure), options.ranks)


def _rank(rank: int, what: str, options: argparse.Namespace, measure: Measure) -> None:
    join(rank, options.ranks)
    measured = measure(options)
    ratios = interleaved.ratios(measured, next(iter(measured)))
    if rank == 0:
        print(what, interleaved.table(measured, ratios), sep="\n", flush=True)
    if rank == 0 and options.output:
        shown = {name: value for name, value in vars(options).items() if name != "output"}
        interleaved.write(
            options.output, {**interleaved.surroundings(), **shown, what: interleaved.summary(measured, ratios)}
        )
    leave()


def join(rank: int, ranks: int) -> None:
    """Makes this process one of several ranks."""
    store = dist.FileStore(f"{tempfile.gettempdir()}/shardkit-benchmark-{os.getppid()}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.set_num_threads(1)


def leave() -> None:
    """Ends the process group when all ranks are here. Collective."""
    dist.barrier()
    dist.destroy_process_group()


def seconds_of(step: Callable[[], Any]) -> float:
    """How long this rank's step takes, started on all ranks together. Collective."""
    gc.collect()
    gc.disable()  # as timeit does: a collection in one contestant's turn is not its own
    dist.barrier()
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    gc.enable()
    return seconds
