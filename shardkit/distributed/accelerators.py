"""The accelerator of this process, whichever it is: CUDA, ROCm (which calls itself cuda), XPU, NPU, MPS, ...

Everything goes through `torch.accelerator` and the device's own module, which torch and its extensions keep alike. What
only CUDA has is asked for by name in the files that tests/test_accelerators.py lists, and nowhere else.
"""

from typing import Any

import torch
import torch.distributed as dist

from shardkit.distributed import xla

# Devices on which torch has no collectives: one process.
ALONE = ("mps",)


def kind() -> str | None:
    """The accelerator's name as a device type (`cuda`, `xpu`, `npu`, ...); None where this machine has none.
    PyTorch/XLA is an accelerator once it is started: a process computes on nothing else then."""
    if xla.is_started():
        return "xla"
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def count() -> int:
    """How many of them this process sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def take(index: int) -> torch.device:
    """The accelerator of this number, from now on the current one of this process."""
    device = torch.device(kind() or "cpu", index)
    torch.accelerator.set_device_index(index)
    return device


def is_used() -> bool:
    """Whether this process has begun to use its accelerator, which processes forked from it cannot share then."""
    found = kind()
    if found == "xla":
        return True
    begun = getattr(_module(torch.device(found)), "is_initialized", None) if found else None
    return bool(begun is not None and begun())


def backend_for(device: torch.device) -> str:
    """What joins ranks on this kind of device: gloo for the CPU side, and the device's own backend beside it.

    A backend that an extension registered for its device is found by torch.
    """
    if device.type in ("cpu", "xla") or device.type in ALONE:
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def name_of(device: torch.device) -> str:
    """The name of the hardware, where its module tells one; else its type."""
    if device.type == "xla":
        return xla.name_of_hardware()
    tell = getattr(_module(device), "get_device_name", None) if device.type != "cpu" else None
    return str(tell(device)) if tell is not None else device.type


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None where the device has none, or does not tell."""
    tell = getattr(_module(device), "get_device_capability", None) if device.type == "cuda" else None
    return None if tell is None else tell(device)


def peak_bytes(device: torch.device) -> int:
    """The most that tensors on the device took so far; 0 with XLA, whose devices act as one that does not tell."""
    if device.type == "xla":
        return 0
    return torch.accelerator.max_memory_allocated(device)


def empty_cache() -> None:
    """Gives memory that no tensor uses back to the device; nothing without one."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def can_pin() -> bool:
    """Whether host memory can be pinned for faster copies to the accelerator."""
    return kind() not in (None, "xla", *ALONE)


def random_state() -> tuple[str, torch.Tensor] | None:
    """(the accelerator's kind, where its generator stands); None without one."""
    found = kind()
    if found == "xla":
        return found, xla.random_state()
    return None if found is None else (found, _module(torch.device(found)).get_rng_state())


def set_random_state(state: torch.Tensor) -> None:
    """Puts the generator of the accelerator, which is of the kind that the state came from, where it stood."""
    if kind() == "xla":
        xla.set_random_state(state)
        return
    _module(torch.device(kind() or "cpu")).set_rng_state(state)


def _module(device: torch.device) -> Any:
    """`torch.cuda`, `torch.xpu`, ...: what the device has for itself."""
    return torch.get_device_module(device)
