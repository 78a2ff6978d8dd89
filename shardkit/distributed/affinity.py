"""`enable_cpu_affinity`: this process runs on the cores of the NUMA node to which its GPU is attached."""

import os
from pathlib import Path

import torch

from shardkit.distributed import accelerators
from shardkit.log import get_logger

log = get_logger(__name__)


def pin(device: torch.device, system: Path = Path("/sys"), tasks: Path = Path("/proc/self/task")) -> None:
    """Pins all threads of this process to those of its cores that are next to the device; a warning says why where that
    cannot be. Threads that are started later inherit it."""
    try:
        near = cores_next_to(device, system)
        allowed = near & os.sched_getaffinity(0)
        for task in tasks.iterdir() if allowed else ():
            os.sched_setaffinity(int(task.name), allowed)
        problem = None if allowed else "none" if not near else "only some that this process may not use"
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: only Linux has an affinity
        problem = str(error)
    if problem:
        log.warning(
            "enable_cpu_affinity: no effect: the cores next to %s are not found (got %s); leave it out.",
            device,
            problem,
        )


def cores_next_to(device: torch.device, system: Path) -> set[int]:
    """The cores of the device's NUMA node; none where it has no PCI address, or the machine has one node only."""
    address = accelerators.pci_address(device)
    if address is None:
        return set()
    node = int((system / "bus/pci/devices" / address / "numa_node").read_text())
    return set() if node < 0 else _numbers((system / f"devices/system/node/node{node}/cpulist").read_text())


def _numbers(text: str) -> set[int]:
    """`0-3,8` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
