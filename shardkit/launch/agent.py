"""torch elastic's agent over processes of ours: it gives out ranks and variables, and collects failures."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardkit import env
from shardkit.launch.ways import Process, Start

POLL_S = 0.02
TERM_S = 30.0
"""How long ranks have between SIGTERM and SIGKILL, after another one has failed."""


class Agent(SimpleElasticAgent):
    """Starts the ranks once, and waits until all have ended well or one has failed."""

    def __init__(self, spec: WorkerSpec, start: Start, folder: Path, restart: int, max_restarts: int) -> None:
        super().__init__(spec)
        self._start, self._folder = start, folder
        self._restart, self._max_restarts = restart, max_restarts
        self._processes: Sequence[Process] = ()

    def exit_codes(self) -> dict[int, int]:
        """How every rank of this machine has ended, by rank; for after `run`."""
        codes = {worker.global_rank: self._processes[worker.local_rank].poll() for worker in self._worker_group.workers}
        return {rank: code for rank, code in codes.items() if code is not None}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._processes = self._start([self._variables(worker_group, worker) for worker in worker_group.workers])
        return {local_rank: process.pid for local_rank, process in enumerate(self._processes)}

    def _variables(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """What torch elastic tells a rank."""
        spec = group.spec
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "GROUP_RANK": str(group.group_rank),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._restart),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(worker.local_rank)),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
        }

    def _error_file(self, local_rank: int) -> Path:
        """Where a script that uses torch elastic's `record` leaves its error."""
        return self._folder / f"elastic-{local_rank}.json"

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {worker.global_rank: self._processes[worker.local_rank].poll() for worker in worker_group.workers}
        failures = {
            worker.global_rank: ProcessFailure(
                worker.local_rank, worker.id, code, str(self._error_file(worker.local_rank))
            )
            for worker in worker_group.workers
            if (code := codes[worker.global_rank])
        }
        if failures:
            return RunResult(WorkerState.FAILED, failures=failures)
        if all(code == 0 for code in codes.values()):
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(codes))
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = TERM_S) -> None:
        """Ends the ranks that still run, and what they have started themselves and that is still there."""
        self._tell(death_sig)
        until = time.monotonic() + timeout
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until:
            time.sleep(POLL_S)
        self._tell(signal.SIGKILL)
        while any(process.poll() is None for process in self._processes):
            time.sleep(POLL_S)

    def _tell(self, number: int) -> None:
        """Sends a signal to every rank that still runs, and to what it has started."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # torch's own looks up this machine's full name for every event of a rank: seconds where names resolve badly.
        return Event(f"torchelastic.worker.status.{state}", source=source)
