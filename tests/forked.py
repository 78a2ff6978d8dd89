"""Ranks that are meant to die: forked from one parent that has imported torch, so that a scenario costs about a second.

    outcomes = forked.run(2, save_twice, folder, fault="rename:0:kill")      # one Outcome a rank

Each rank runs `function(*args)` in a process group of its own and tells its JSON-able result, or what it raised; a rank
that was killed tells nothing. `arm(fault)` makes the running rank fail; the mark it leaves proves that it did.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["pytest", "torch.distributed.fsdp", "torch._dynamo", "tests.checkpoints", "shardkit.runtime.checkpoints.saving"]
)


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its exit code (negative: the signal that killed it), and its result or error."""

    exit_code: int | None
    value: Any
    error: str | None
    marks: frozenset[str]


def run(world_size: int, function: Callable, *args: Any, fault: str | None = None) -> list[Outcome]:
    """`function(*args)` on fresh ranks; `fault` is armed for all of them from the start."""
    with _started(world_size, fault, function, args) as (folder, processes):
        deadline = time.monotonic() + TIMEOUT_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not stuck, f"ranks {stuck} did not end in {TIMEOUT_S:.0f} s"
        marks = frozenset(path.name for path in (folder / "marks").iterdir())
        return [_outcome(folder / f"rank-{rank}.json", one.exitcode, marks) for rank, one in enumerate(processes)]


@contextmanager
def _started(world_size: int, fault: str | None, function: Callable, args: Any) -> Iterator[tuple[Path, list[Any]]]:
    """Fresh ranks at work; none of them is left when the block ends."""
    with tempfile.TemporaryDirectory(prefix="shardkit-forked-") as name:
        (Path(name) / "marks").mkdir()
        processes = [
            context.Process(target=_rank, args=(rank, world_size, Path(name), fault, function, args))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            yield Path(name), processes
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def run_and_kill(
    world_size: int, function: Callable, *args: Any, generator: Any, ready: Path, longest_s: float = 0.5
) -> bool:
    """Start ranks that never end, wait for `ready` to exist, and kill all or one of them at a random time after."""
    with _started(world_size, None, function, args) as (_, processes):
        deadline = time.monotonic() + TIMEOUT_S
        while not ready.exists() and time.monotonic() < deadline and processes[0].is_alive():
            time.sleep(0.005)
        time.sleep(generator.random() * longest_s)
        victims = processes if generator.random() < 0.5 else [generator.choice(processes)]
        for process in victims:
            process.kill()
        for process in processes:
            process.join(TIMEOUT_S)
        return any(process.exitcode == -signal.SIGKILL for process in victims)


def _outcome(path: Path, exit_code: int | None, marks: frozenset[str]) -> Outcome:
    value, error = json.loads(path.read_text()) if path.exists() else (None, None)
    return Outcome(exit_code, value, error, marks)


def arm(fault: str | None) -> None:
    """From now on this rank fails as told; None: no longer."""
    os.environ.pop("SHARDKIT_FAULT", None)
    if fault:
        os.environ["SHARDKIT_FAULT"] = fault


def _rank(rank: int, world_size: int, folder: Path, fault: str | None, function: Callable, args: Any) -> None:
    for variable in [name for name in os.environ if name.startswith("SHARDKIT_")]:
        del os.environ[variable]  # the parent may have been started in the middle of another test
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ["SHARDKIT_FAULT_MARKS"] = str(folder / "marks")
    sys.stderr = open(folder / f"rank-{rank}.log", "w")  # noqa: SIM115
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    arm(fault)
    try:
        answer = [function(*args), None]
    except Exception:
        answer = [None, traceback.format_exc()]
    whole = folder / f".rank-{rank}.json"
    whole.write_text(json.dumps(answer))
    whole.rename(folder / f"rank-{rank}.json")
    sys.stderr.close()
    os._exit(0)
