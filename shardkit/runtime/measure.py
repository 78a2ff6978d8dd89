"""Measured memory of a run, for `shardkit launch --measure`: each rank's peak, and its parts."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardkit import env
from shardkit.distributed import accelerators
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import local_part
from shardkit.launch import names
from shardkit.log import get_logger
from shardkit.runtime.run import Run
from shardkit.sizes import in_words

log = get_logger(__name__)
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class MeasuredMemory:
    """One rank's memory in bytes. `peak_bytes`: allocated on the device; on the CPU, the growth of the process."""

    rank: int
    device: str
    peak_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def is_asked_for() -> bool:
    """Whether the run was launched with --measure."""
    return env.is_true(names.MEASURE)


def resident_bytes(line: str = "VmRSS") -> int:
    """This process's resident memory, current (VmRSS) or peak (VmHWM); 0 where the system does not report it."""
    if not _STATUS.exists():
        return 0
    found = [text for text in _STATUS.read_text(errors="replace").splitlines() if text.startswith(f"{line}:")]
    return int(found[0].split()[1]) * 1024 if found else 0


def start(device: torch.device) -> int:
    """This process's resident bytes now, before anything is prepared. Under --measure a GPU records from here on."""
    if is_asked_for() and device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    return resident_bytes()


def peak_bytes(run: Run) -> int:
    """This rank's peak memory so far; see `MeasuredMemory`."""
    on_cpu = run.device.type == "cpu"
    return max(0, resident_bytes("VmHWM") - run.started_bytes if on_cpu else accelerators.peak_bytes(run.device))


def memory_of(run: Run) -> MeasuredMemory:
    """This rank's memory so far."""
    parameters = [parameter for model in run.models for parameter in every_parameter(model)]
    states = [list(optimizer.state.values()) for optimizer in run.optimizers]
    return MeasuredMemory(
        run.process.rank,
        accelerators.name_of(run.device),
        peak_bytes(run),
        _bytes_of(parameters),
        _bytes_of(parameter for parameter in parameters if parameter.requires_grad),
        _bytes_of(tree_leaves(states)),
    )


def report(run: Run) -> None:
    """Writes every rank's memory (on a GPU also a snapshot) next to its log, and logs the largest. Collective."""
    mine = memory_of(run)
    everyone = [MeasuredMemory(**one) for one in run.process.control.exchange(asdict(mine))]
    log.info("%s", text(everyone))
    folder = env.get(names.LOG_DIR)
    if folder:
        path = Path(folder) / f"rank{mine.rank}.memory.json"
        path.write_text(json.dumps(asdict(mine), indent=1) + "\n")
        if run.device.type == "cuda":  # every allocation with its stack, for pytorch.org/memory_viz
            torch.cuda.memory._dump_snapshot(str(path.with_name(f"rank{mine.rank}.snapshot.pickle")))


def text(everyone: list[MeasuredMemory]) -> str:
    """One line about the rank with the largest peak."""
    most = max(everyone, key=lambda memory: memory.peak_bytes)
    rest = most.peak_bytes - most.parameter_bytes - most.gradient_bytes - most.optimizer_bytes
    parts = {
        "parameters": most.parameter_bytes,
        "gradients": most.gradient_bytes,
        "optimizer": most.optimizer_bytes,
        "the rest": max(0, rest),
    }
    listed = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items())
    peak = in_words(most.peak_bytes)
    return f"measured: peak {peak} on rank {most.rank} of {len(everyone)} ({most.device}): {listed}"


def _bytes_of(values: Iterable[Any]) -> int:
    tensors = [local_part(value) for value in values if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
