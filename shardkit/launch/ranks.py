"""The ranks of this machine: starts them, waits for them, and ends them after a failure."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit import env
from shardkit.errors import EXIT_PREEMPTED
from shardkit.launch import addresses
from shardkit.launch.meeting import Meeting
from shardkit.launch.monitor import SURVIVOR_GRACE_S, Monitor
from shardkit.launch.spec import LaunchSpec
from shardkit.launch.start_methods import RankProcess, Start
from shardkit.launch.store_client import Alarm

POLL_S = 0.02
BEGIN_S = 60.0
"""How long ranks may take to reach their Accelerator before they are told to make way for a new world all the same."""
TERM_S = 30.0
"""How long ranks have between SIGTERM and SIGKILL; after a failure of a rank of this machine the monitor ends them
earlier."""
PEERLESS_TERM_S = 5.0
"""As TERM_S, after ranks of another machine have ended, or hang: ranks that wait for them in a barrier do not end by
SIGTERM."""


@dataclass(frozen=True)
class EndedRanks:
    """How this machine's ranks ended: exit codes by rank (negative for signals), and those that the launcher ended."""

    codes: dict[int, int]
    stopped: frozenset[int]


def run(spec: LaunchSpec, start: Start, meeting: Meeting, folder: Path, restart: int, monitor: Monitor) -> EndedRanks:
    """Starts the ranks, and waits until all have succeeded, or one has failed here or on another machine."""
    own = [variables_of(spec, meeting, folder, restart, local_rank) for local_rank in range(spec.ranks_here)]
    attempt = name_of(restart)
    with meeting.telling_what_lacks():
        processes = start(own)
    alarm = None
    try:
        alarm = until_over(processes, attempt, meeting, monitor)
        codes = [process.poll() for process in processes]
        if any(code not in (0, None, EXIT_PREEMPTED) for code in codes):
            meeting.raise_alarm(attempt, Alarm.FAILURE)
        elif alarm is not None and not any(codes):  # another machine's rank has failed: these will notice
            monitor.hear_of(alarm)
            wait_for(processes, SURVIVOR_GRACE_S)
        stopped = {spec.first_rank + local for local, process in enumerate(processes) if process.poll() is None}
    finally:
        end(processes, TERM_S if alarm is None else PEERLESS_TERM_S)
    return EndedRanks(
        {spec.first_rank + local: process.poll() or 0 for local, process in enumerate(processes)}, frozenset(stopped)
    )


def until_over(processes: Sequence[RankProcess], attempt: str, meeting: Meeting, monitor: Monitor) -> Alarm | None:
    """Waits until the ranks here are `over`, or a machine raises an alarm: returns that. Raises this machine's alarm
    where its ranks hang, and tells its ranks to make way where the run wants a new world."""
    alarm = None
    while alarm is None and not over(processes):
        time.sleep(POLL_S)
        if monitor.is_hung:
            meeting.raise_alarm(attempt, Alarm.HANG)
        wanted = meeting.wants_new_world
        if wanted and monitor.stop is None and monitor.has_begun(BEGIN_S) and wanted():
            monitor.tell_to_make_way()
        alarm = meeting.hears_alarm(attempt)
    return alarm


def name_of(restart: int) -> str:
    """The store's name for one start of the ranks."""
    return f"attempt-{restart}"


def over(processes: Sequence[RankProcess]) -> bool:
    """Whether one has failed, or all have ended."""
    codes = [process.poll() for process in processes]
    return any(codes) or None not in codes


def wait_for(processes: Sequence[RankProcess], timeout_s: float) -> None:
    """Wait until all have ended, or the time is over."""
    until = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(POLL_S)


def end(processes: Sequence[RankProcess], term_s: float) -> None:
    """Ends the ranks that still run, by SIGKILL after `term_s`; after a failure also what the ranks have started and
    left behind."""
    has_failed = any(process.poll() != 0 for process in processes)
    if has_failed:
        tell(processes, signal.SIGTERM)
        wait_for(processes, term_s)
        tell(processes, signal.SIGKILL)
        wait_for(processes, float("inf"))


def tell(processes: Sequence[RankProcess], number: int) -> None:
    """Sends a signal to every rank and to what it has started: each rank leads a process group of its own."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def variables_of(spec: LaunchSpec, meeting: Meeting, folder: Path, restart: int, local_rank: int) -> dict[str, str]:
    """torch elastic's variables of a rank."""
    rank = spec.first_rank + local_rank
    return {
        **({} if env.get("GLOO_SOCKET_IFNAME") else addresses.gloo_variables(meeting.address, *meeting.others)),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(spec.machine_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(spec.ranks_here),
        "GROUP_WORLD_SIZE": str(spec.num_machines),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.launch.max_restarts),
        "TORCHELASTIC_RUN_ID": f"shardkit-{restart}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(folder / f"elastic-{local_rank}.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
    }
