"""One rank of `benchmarks.step`: sets all contestants up in this process and lets them take turns.

shardkit launch ... -m benchmarks.step_rank TASK.json RESULT.json
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import interleaved
from benchmarks.contestants import FAMILIES, Loop, Task, Unavailable


def main() -> None:
    """Measures; rank 0 leaves seconds a step and round, CPU seconds likewise, and who did not take part."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    loops, left_out = set_up(asked["family"], Task(**asked["task"]))
    # Peers set it for the whole process; all get the same share of the cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    cpu_s: dict[str, list[float]] = {name: [] for name in loops}
    actions: dict[str, Callable[[], float]] = {
        name: partial(timed, loop, asked["steps"], cpu_s[name]) for name, loop in loops.items()
    }
    for loop in loops.values():
        loop(asked["steps"])  # once before: allocations, DDP's buckets, optimizer state
    wall_s = interleaved.measure(actions, asked["rounds"])
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "left_out": left_out}))
    dist.barrier()


def set_up(family: str, task: Task) -> tuple[dict[str, Loop], dict[str, str]]:
    """A loop for each contestant, shardkit first (it starts the process group), and why others have none."""
    loops: dict[str, Loop] = {}
    left_out: dict[str, str] = {}
    for name, prepare in FAMILIES[family].items():
        try:
            loops[name] = prepare(task)
        except Unavailable as reason:
            left_out[name] = str(reason)
    return loops, left_out


def timed(loop: Loop, steps: int, cpu_s: list[float]) -> float:
    """Seconds a step until all ranks are done; appends CPU seconds a step of all ranks together. Collective."""
    gc.collect()
    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    loop(steps)
    _synchronize()
    used: Any = torch.tensor([time.process_time() - cpu_started])
    dist.barrier()
    seconds = time.perf_counter() - started
    dist.all_reduce(used)
    cpu_s.append(float(used) / steps)
    return seconds / steps


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
