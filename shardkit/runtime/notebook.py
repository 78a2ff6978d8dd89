"""Ranks started from a notebook or a test: a function runs in several forked processes on this machine."""

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from shardkit import env
from shardkit.config import hardware
from shardkit.config.schema import read_precision
from shardkit.distributed import accelerators
from shardkit.distributed.process import leave
from shardkit.errors import MachineError, UsageError
from shardkit.launch import forking
from shardkit.launch.addresses import listen
from shardkit.log import get_logger
from shardkit.wording import counted, ranks_text

log = get_logger(__name__)

# How long a forked rank may take to its first line: milliseconds, on a busy machine seconds.
READY_S = 30.0
# How often ranks are forked anew where one did not come so far.
TRIES = 3
# How long ranks may take to end where the cell is interrupted: as long as those of `shardkit launch`.
GRACE_S = 30.0


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    **others: Any,
) -> None:
    """Runs `function(*args)` on `num_processes` ranks of this machine (default: one per GPU, else one), and returns
    when all are done. Create the Accelerator and everything on the device inside the function, so that a cell can be
    run again.

    Ranks are forked, so the function may be defined in the notebook. Raises UsageError where this process has already
    used the GPU or has a process group; MachineError where a rank hangs before the function; an error of a rank is
    raised with its traceback.
    """
    _refuse_others(others)
    devices = len(hardware.detect().devices)  # found without the driver, which forked ranks could not use afterwards
    settings = {} if read_precision(mixed_precision) == "no" else {"mixed_precision": mixed_precision}
    if accelerators.is_used() or (devices and _forks_lose_devices()):
        module = f"torch.{accelerators.kind() or 'cuda'}"
        raise UsageError(
            f"notebook_launcher: this process has already used the GPU, or asked its driver about it, and forked ranks "
            f"cannot use it then (got {module} initialized, or a call such as {module}.is_available); restart the "
            f"notebook, and use {module} only inside the function."
        )
    number = num_processes or devices or accelerators.count() or 1
    _launch("notebook_launcher", function, args, number, settings, use_port)


def _forks_lose_devices() -> bool:
    """Whether a process that is forked now cannot use the accelerator: tried, since torch knows it only there."""
    pid = forking.fork()
    if pid == 0:
        os._exit(int(accelerators.is_lost_after_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """As `notebook_launcher`, on the CPU: for tests of code that runs on several ranks."""
    _launch("debug_launcher", function, args, num_processes, {"use_cpu": "true"}, None)


def _refuse_others(others: dict[str, Any]) -> None:
    """Several machines, restarts and logs need `shardkit launch`."""
    defaults = {"num_nodes": 1, "node_rank": 0, "max_restarts": 0, "master_addr": "127.0.0.1"}
    used = [f"{name}={value!r}" for name, value in others.items() if value is not None and defaults.get(name) != value]
    if used:
        raise UsageError(
            f"notebook_launcher: only starts ranks on this machine (got {', '.join(used)}); use `shardkit launch`."
        )


def _launch(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    number: int,
    settings: dict[str, str],
    port: int | str | None,
) -> None:
    if number < 1:
        raise UsageError(f"{name}(num_processes=...): must be 1 or more (got {number}); write the number of ranks.")
    if env.ranks() is not None:
        raise UsageError(
            f"{name}: this process is a rank itself (got RANK in the environment); call it from a plain process: a "
            "script for `shardkit launch` needs no launcher inside."
        )
    if dist.is_initialized():
        raise UsageError(
            f"{name}: this process has a process group, which forked ranks would share (got an Accelerator that was "
            "created here, maybe in an earlier cell or test); call its end_training(), or restart the "
            "notebook, and create the Accelerator only inside the function."
        )
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port())}
    variables = address | {f"SHARDKIT_SET_{key.upper()}": value for key, value in settings.items()}
    log.info("%s: starting %s.", name, counted(number, "rank"))
    ranks = _begun(name, number, partial(_run, function, tuple(args), variables, number))
    with _ended_with_the_call(name, ranks):
        while not ranks.join():  # returns whenever one is done; raises what a rank raised
            pass


@contextmanager
def _ended_with_the_call(name: str, ranks: Any) -> Iterator[None]:
    """Where the block is interrupted, as by the stop button of a notebook, so are the ranks; they would go on in the
    background, and the notebook would wait for them at its own end. Those that do not end in time are killed."""
    try:
        yield
    except BaseException:
        running = [process for process in ranks.processes if process.is_alive()]
        try:
            for process in running:
                os.kill(process.pid, signal.SIGINT)
            if running:
                log.warning("%s: interrupted; the ranks end within %.0f s, once more ends them now.", name, GRACE_S)
            deadline = time.monotonic() + GRACE_S
            for process in running:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in running:
                process.kill()
                process.join()
        raise


def _begun(name: str, number: int, run: Callable[[int], None]) -> Any:
    """Forked ranks that are on their way into `run(rank)`.

    A rank that hangs before has inherited a lock that a thread of this process held at that moment (of the random
    numbers, for instance): all are forked anew, a few times. MachineError where one hangs every time."""
    context = multiprocessing.get_context("fork")
    for _ in range(TRIES):
        are_ready, go = context.RawArray("b", number), context.Event()
        arguments = (run, are_ready, go)
        ranks = multiprocessing.start_processes(_rank, arguments, nprocs=number, join=False, start_method="fork")
        deadline = time.monotonic() + READY_S
        with _ended_with_the_call(name, ranks):
            while not all(are_ready) and time.monotonic() < deadline:
                ranks.join(timeout=0.02)  # raises what a rank raised
        if all(are_ready):
            go.set()
            return ranks
        stuck = ranks_text([rank for rank, is_ready in enumerate(are_ready) if not is_ready])
        log.warning("%s: %s did not begin in %.0f s.", name, stuck, READY_S)
        for process in ranks.processes:
            process.kill()
            process.join()
    raise MachineError(
        f"{name}: {stuck} did not begin (forked {TRIES} times): a thread of this process holds a lock that forked "
        "ones wait for; end the other threads or restart the notebook, or write the function to a file for "
        "`shardkit launch`."
    )


def _free_port() -> int:
    with listen("127.0.0.1", 0) as socket:
        return int(socket.getsockname()[1])


def _rank(rank: int, run: Callable[[int], None], are_ready: Any, go: Any) -> None:
    """What a forked process does: it says that it has come so far, and runs when all have."""
    signal.signal(signal.SIGINT, _interrupted)
    torch.set_num_threads(1)  # the parent's OpenMP threads do not exist after a fork, and OpenMP would wait for them
    _take_locks()
    are_ready[rank] = 1
    go.wait()
    run(rank)


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], number: int, rank: int
) -> None:
    """Calls the function as this rank of so many."""
    here, of = str(rank), str(number)
    env.update(variables | {"RANK": here, "LOCAL_RANK": here, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of})
    try:
        function(*args)
    except BaseException:
        # The end of a group may wait for collectives in flight, for which the other ranks are needed; and from Python
        # 3.13 on forked processes run what atexit has.
        atexit.unregister(leave)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """An interrupt of a notebook may reach a rank twice, directly and from the notebook's process: it counts once."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _take_locks() -> None:
    """What hangs in a process that was forked at a bad moment, if anything does: random numbers, a product, a
    backward."""
    torch.get_rng_state()
    weight = torch.ones(64, 64, requires_grad=True, device="cpu")
    (weight @ weight).sum().backward()
