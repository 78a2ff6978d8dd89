"""A pool of live ranks on this machine: processes that have imported torch once and run functions on request.

    results = ranks.run(2, save_and_load, folder)      # one result a rank, in rank order

Each call is a world of its own: a fresh process group over a fresh store, torn down afterwards; a rank that raises
fails the test with its traceback. A function must be importable (module level), and so must its arguments.
Where a process is meant to die, see tests/forked.py.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.forked import context

TIMEOUT_S = 240.0


class RankError(AssertionError):
    """What a rank raised, with its traceback."""


@contextmanager
def log_lines(name: str = "shardkit", level: int = logging.NOTSET) -> Iterator[list[str]]:
    """The messages of a logger inside the block, from this level on, for functions on ranks, where pytest's caplog sees
    nothing."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)


def _serve(index: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            return
        pipe.send(_answer(index, *request))
        gc.freeze()  # what is left has just been collected: modules, so that the next collection passes them over


def _answer(rank: int, world_size: int, store: str, function: Callable, args: Sequence[Any]) -> tuple[bool, Any]:
    found = dict(os.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    try:
        return True, _in_world(rank, world_size, store, function, args)
    except BaseException:
        return False, traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(found)


def _in_world(rank: int, world_size: int, store: str, function: Callable, args: Sequence[Any]) -> Any:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        result = function(*args)
        dist.barrier()
        return result
    finally:
        # A group that ends with the reducer of torch's DDP waits, holding the GIL, for threads that may need it.
        groups = list(dist.distributed_c10d._world.pg_map)
        leave()
        if compat := sys.modules.get("shardkit.compat.states"):
            compat.AcceleratorState._reset_state(reset_partial_state=True)
        # torch.compile switches these checks off in the processes that have imported it.
        if distributions := sys.modules.get("torch.distributions"):
            distributions.Distribution.set_default_validate_args(True)
        # Models and their groups are in reference cycles, and a group's threads wake a hundred times a second.
        gc.collect()
        del groups


def leave() -> None:
    """Take down this process's process group, where there is one, and what torch keeps by its meshes."""
    import torch

    from shardkit.distributed import background_agreement, process

    background_agreement._end_threads()  # one would hold the store, and write its file, for up to a second more
    process.leave()
    if torch.__version__ < (2, 12):
        _end_groups_of_meshes()


def _end_groups_of_meshes() -> None:
    """torch 2.11 does not free all that its cache held, and a mesh keeps its groups, with three threads each."""
    from torch.distributed.device_mesh import DeviceMesh

    for found in gc.get_objects():
        if type(found) is DeviceMesh:
            vars(found).get("_pg_registry", {}).clear()


class Pool:
    """Long-lived ranks; started on first use, as many as the largest world asked for."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, world_size: int, function: Callable, *args: Any) -> list[Any]:
        """`function(*args)` on ranks 0 to world_size - 1 at once; their results in rank order."""
        self._grow(world_size)
        with tempfile.TemporaryDirectory(prefix="shardkit-ranks-") as folder:
            store = str(Path(folder) / uuid.uuid4().hex)
            try:
                for pipe in self._pipes[:world_size]:
                    pipe.send((world_size, store, function, args))
                answers = self._collect(world_size)
            except BaseException:  # such as pytest's timeout: these answers would be taken for those of the next test
                self.close()
                raise
        failed = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failed:
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def _collect(self, world_size: int) -> list[tuple[bool, Any]]:
        waiting = {self._pipes[rank]: rank for rank in range(world_size)}
        answers: dict[int, tuple[bool, Any]] = {}
        died: list[int] = []
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                raise RankError(f"ranks {sorted(waiting.values())} gave no answer in {TIMEOUT_S:.0f} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join(timeout=5)
                    died.append(rank)
                    answers[rank] = (False, f"the process died (exit code {self._processes[rank].exitcode})")
        if died:
            self.close()
        return [answers[rank] for rank in range(world_size)]

    def _grow(self, world_size: int) -> None:
        while len(self._processes) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(len(self._processes), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def close(self) -> None:
        """End all ranks; the next `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
