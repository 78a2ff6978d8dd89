"""One measurement of `benchmarks.gpu`: a process of its own, for as long as its section has."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_rank import Order

ROOT = Path(__file__).parent.parent
BILLION = {"layers": 22, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 2048, "batch": 4, "steps": 10}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "batch": 2, "steps": 2}
# What its largest configuration takes, with what the allocator keeps (docs/reference/plan-accuracy.md). On less memory
# layers and batch are fewer.
ENOUGH_BYTES = 40 * 2**30
OVER = "its share of the minutes is over"
# Variables of a job around `make gpu`: each process here is one of its own, with the settings that it is given.
OF_A_JOB = ("SHARDKIT_", "ACCELERATE_", "FSDP_", "SLURM_", "OMPI_", "PMI", "PET_", "TORCHELASTIC_", "MASTER_")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class Failed(Exception):
    """A measurement that did not end well; what its process said last."""


class TimeIsUp(Failed):
    """The section has had its share of the minutes."""


@dataclass
class Options:
    """What is measured, how, and until when (by time.monotonic)."""

    device: str = "cuda"
    rounds: int = 3
    small: bool = False
    minutes: float = 19.0
    only: list[str] = field(default_factory=list)
    output: Path | None = None
    table: Path | None = None
    until: float = float("inf")
    memory_bytes: int | None = None
    """Of the device; None where that is not known."""
    precision: str = "bf16"
    """Of the runs that name none: fp32 ("no") where the device has no bf16, in which shardkit computes there."""

    @property
    def left_s(self) -> float:
        """Seconds that the section has. Raises TimeIsUp where there is not one."""
        left = self.until - time.monotonic()
        if left < 1:
            raise TimeIsUp(OVER)
        return left


def measured(options: Options, task: str, contestant: str, **changes: Any) -> dict[str, Any]:
    """The result of one process. Failed, with its last lines, where it does not end well or in time."""
    order = order_of(options, task, contestant, **changes)
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "order.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(asdict(order)))
        done = run(options, [sys.executable, "-m", "benchmarks.gpu_rank", str(asked), str(answer)])
        if not answer.exists():
            killed = "SIGKILL " if done.returncode == -signal.SIGKILL else ""
            raise Failed(f"{killed}{done.stderr.strip()[-2000:]} (exit code {done.returncode})")
        return json.loads(answer.read_text())


def order_of(options: Options, task: str, contestant: str, **changes: Any) -> Order:
    """What a process is to measure: the model of the benchmark, with these changes."""
    shape = SMALL if options.small else fitted(options, BILLION)
    given = {"task": task, "contestant": contestant, "device": options.device, "precision": options.precision}
    return Order(**{**given, **shape, **changes})


def fitted(options: Options, shape: dict[str, Any]) -> dict[str, Any]:
    """The shape, with as much of its layers and its batch as the device has of the memory that is enough for all."""
    part = min(1.0, (options.memory_bytes or ENOUGH_BYTES) / ENOUGH_BYTES)
    return {name: max(1, int(part * of)) if name in ("layers", "batch") else of for name, of in shape.items()}


def run(options: Options, command: list[str]) -> "subprocess.CompletedProcess[str]":
    """The command, with the processes that it starts, for as long as the section has."""
    with running(options, command) as result:
        return result()


@contextmanager
def running(options: Options, command: list[str]) -> Iterator[Callable[[], "subprocess.CompletedProcess[str]"]]:
    """The command beside the block; the call waits for its result, for as long as the section has. What still runs at
    the end of the block is killed, with the processes that it started."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=printed, stderr=errors, text=True, cwd=ROOT, env=_variables(), start_new_session=True
        )

        def result() -> "subprocess.CompletedProcess[str]":
            try:
                process.wait(options.left_s)
            except (subprocess.TimeoutExpired, TimeIsUp):
                raise TimeIsUp(f"{_text(printed)}\n{OVER}") from None
            return subprocess.CompletedProcess(command, process.returncode, _text(printed), _text(errors))

        try:
            yield result
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _variables() -> dict[str, str]:
    """This process's variables, without those of a job around it, and without what containers of NVIDIA set for speed:
    fp32 is computed in fp32."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)}
    fp32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "NVIDIA_TF32_OVERRIDE": "0"}
    # Without the width pytest cuts its reasons; plugins of other people's packages may not even let it begin.
    return {**inherited, **ALONE, **fp32, "COLUMNS": "250", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
