"""SIGTERM and SIGUSR1 end a run at a step boundary that all ranks agree on, with a checkpoint and exit code 75.

    preemption.install()                                     once, in the main thread
    preemption.stop_if_requested(save, control_group)        at every step boundary, on every rank

A scheduler signals the launcher, one rank, or all of them; whoever hears it first, all ranks stop at the same step.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from shardkit import env
from shardkit.errors import Preempted
from shardkit.launch import names

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_received: list[int] = []
_found: dict[int, object] = {}


def install() -> None:
    """From now on SIGTERM and SIGUSR1 are remembered, not obeyed at once. Only in the main thread; twice is once."""
    if _found or threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        _found[number] = signal.signal(number, _remember)


def uninstall() -> None:
    """Signals do again what they did before `install`; what was received is forgotten."""
    for number, handler in _found.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    _found.clear()
    _received.clear()


def is_requested_here() -> bool:
    """Whether this rank itself was told to stop. Ranks may differ; see `requested`."""
    return bool(_received)


def requested(control_group: "ProcessGroup | None" = None) -> bool:
    """Whether any rank was told to stop, the same answer on all ranks. Collective: one number over the control group.

    The group should be on gloo, so that neither the device nor its stream is waited for.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(control_group) == 1:
        return is_requested_here()
    flag = torch.tensor([int(is_requested_here())], dtype=torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=control_group)
    return bool(flag.item())


def stop_if_requested(save: Callable[[], object], control_group: "ProcessGroup | None" = None) -> None:
    """Returns where nobody asked to stop; else saves and raises Preempted (exit code 75), on every rank.

    Collective: every rank calls it at the same step boundary. `save` is called on every rank and is waited for.
    """
    if not requested(control_group):
        return
    save()
    raise Preempted("launch: told to stop; the state is saved, and a run with --resume auto goes on from it.")


def _remember(number: int, frame: FrameType | None) -> None:
    """The first signal is remembered. A second one ends a process that has no launcher to do it; a launched one waits,
    because schedulers signal the launcher and its ranks both."""
    if _received and not env.get(names.LAUNCHER_PID):
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _received.append(number)
