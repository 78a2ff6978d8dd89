"""Ranks started from a notebook or a test: a function runs in several forked processes on this machine."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from shardkit import env
from shardkit.config.schema import read_precision
from shardkit.distributed import accelerators
from shardkit.errors import UsageError
from shardkit.launch.addresses import listen
from shardkit.log import get_logger

log = get_logger(__name__)


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
    used the GPU or has a process group; an error of a rank is raised with its traceback.
    """
    _refuse_others(others)
    number = num_processes or accelerators.count() or 1
    settings = {} if read_precision(mixed_precision) == "no" else {"mixed_precision": mixed_precision}
    if number > 1 and accelerators.is_used():
        raise UsageError(
            "notebook_launcher: this process has already used the GPU, which forked ranks cannot share (got "
            f"{accelerators.kind()} initialized); restart the notebook, and use the GPU only inside the function."
        )
    _launch("notebook_launcher", function, args, number, settings, use_port)


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
    if env.ranks() is not None or dist.is_initialized():
        raise UsageError(
            f"{name}: this process is a rank itself (got a process group, or RANK in the environment); "
            "call it from a plain process: a script for `shardkit launch` needs no launcher inside."
        )
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or _free_port())}
    sets = {f"SHARDKIT_SET_{key.upper()}": value for key, value in settings.items()}
    log.info("%s: starting %d ranks.", name, number)
    multiprocessing.start_processes(
        _rank, (number, function, tuple(args), address | sets), nprocs=number, start_method="fork"
    )


def _free_port() -> int:
    with listen("127.0.0.1", 0) as socket:
        return int(socket.getsockname()[1])


def _rank(rank: int, number: int, function: Callable[..., Any], args: tuple[Any, ...], said: dict[str, str]) -> None:
    torch.set_num_threads(1)  # the parent's OpenMP threads do not exist after a fork, and OpenMP would wait for them
    here, of = str(rank), str(number)
    env.update(said | {"RANK": here, "LOCAL_RANK": here, "WORLD_SIZE": of, "LOCAL_WORLD_SIZE": of})
    try:
        function(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
