"""A step boundary: what it costs to know, at every step and on every rank, whether the run is to stop.

    python -m benchmarks.boundary [--ranks 2 8 32] [--boundaries 200] [--rounds 5] [--output boundary.json]

CPU ranks with gloo on this machine. "beside" is what shardkit does: threads agree through the store, and a boundary
counts. "asked" is an agreement of all ranks at each boundary, "all-reduce" the least that torch can do for it: one
number. Seconds are those of one boundary, on rank 0, with nothing else between two of them.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import interleaved
from shardkit.distributed import control
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.runtime.likely_mistakes.same_modules import noticed_late

BESIDE, ASKED, REDUCED = "beside", "asked", "all-reduce"


def main() -> None:
    """Measure, print a table for each number of ranks, write JSON where it is asked for."""
    options = _options()
    result: dict[str, Any] = interleaved.surroundings()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (ranks, options, Path(folder)), ranks)
            measured = torch.load(Path(folder) / "measured", weights_only=True)
        ratios = interleaved.ratios(measured, BESIDE)
        result[str(ranks)] = interleaved.summary(measured, ratios)
        print(f"{ranks} ranks, one boundary", interleaved.table(measured, ratios, "us"), sep="\n", flush=True)
    if options.output:
        interleaved.write(options.output, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--boundaries", type=int, default=200, help="in one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=interleaved.writable)
    return parser.parse_args()


def _rank(rank: int, ranks: int, options: argparse.Namespace, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    agreement, everyone, flag = BackgroundAgreement(lambda: False, noticed_late), control.start(), torch.zeros(1)
    actions: dict[str, Callable[[], Any]] = {
        BESIDE: agreement.pass_boundary,
        ASKED: lambda: everyone.any(False),
        REDUCED: lambda: dist.all_reduce(flag),
    }
    for action in actions.values():
        action()
    measured = interleaved.measure(
        {name: lambda action=action: _seconds(action, options.boundaries) for name, action in actions.items()},
        options.rounds,
    )
    if rank == 0:
        torch.save(measured, folder / "measured")
    dist.barrier()
    agreement.close()
    dist.destroy_process_group()


def _seconds(action: Callable[[], Any], boundaries: int) -> float:
    """Of one boundary. Collective."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(boundaries):
        action()
    seconds = (time.perf_counter() - started) / boundaries
    dist.barrier()
    return seconds


if __name__ == "__main__":
    main()
