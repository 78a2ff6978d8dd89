"""The control plane: what ranks pay to meet and to agree, as the world grows.

    python -m benchmarks.control_plane [--ranks 2 8 32 64] [--times 20] [--output control_plane.json]

CPU ranks with gloo on this machine, forked from one process that has loaded torch. "meet": from when all are there to
the process group, by TCPStore, with its connections; "collect": every rank's value to rank 0; "share": rank 0's value
to all; "exchange": both, as every agreement at the start and in a save is made. Seconds on rank 0, median of `--times`.
"store requests": what the store of rank 0 answers while all ranks ask. Sockets of rank 0 afterwards. All ranks share
this machine's cores: a cluster is faster, its growth is the same.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import interleaved
from shardkit.distributed import control

REQUESTS = 200
VALUE = {"problem": None, "host": "node-0001", "digest": "0" * 64}


def main() -> None:
    """Measure, print a line for each number of ranks, write JSON where it is asked for."""
    options = _options()
    result: dict[str, Any] = interleaved.surroundings()
    torch.set_num_threads(1)
    for ranks in options.ranks:
        found = result[str(ranks)] = measured(ranks, options.times)
        parts = [f"{name} {found[name] * 1e3:.2f} ms" for name in ("collect", "share", "exchange")]
        parts += [f"{found['requests_per_s']:,.0f} store requests/s", f"{found['sockets']} sockets"]
        print(f"{ranks:>5} ranks: meet {found['meet']:.2f} s, {', '.join(parts)}", flush=True)
    if options.output:
        interleaved.write(options.output, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--output", type=interleaved.writable)
    return parser.parse_args()


def measured(ranks: int, times: int) -> dict[str, float]:
    """What rank 0 of so many measures."""
    forked = multiprocessing.get_context("fork")
    start, found = forked.Barrier(ranks), forked.SimpleQueue()
    arguments = (ranks, interleaved.free_port(), times, start, found)
    processes = [forked.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    result: dict[str, float] = found.get()
    for process in processes:
        process.join()
    return result


def _rank(rank: int, ranks: int, port: int, times: int, start: Any, found: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    start.wait()
    began_s = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    result = {"meet": time.perf_counter() - began_s}
    everyone = control.start()
    actions: dict[str, Callable[[], Any]] = {
        "collect": lambda: everyone.collect(VALUE),
        "share": lambda: everyone.share(VALUE),
        "exchange": lambda: everyone.exchange(VALUE),
    }
    for name, action in actions.items():
        result[name] = statistics.median(_seconds(action) for _ in range(times))
    store = dist.distributed_c10d._get_default_store()
    taken_s = _seconds(lambda: [store.check(["missing"]) for _ in range(REQUESTS)])
    result["requests_per_s"] = ranks * REQUESTS / taken_s
    if rank == 0:
        result["sockets"] = sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket") for fd in _descriptors())
        found.put(result)
    dist.barrier()
    dist.destroy_process_group()


def _seconds(action: Callable[[], Any]) -> float:
    """One time, after all ranks are there."""
    dist.barrier()
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


if __name__ == "__main__":
    main()
