"""The accelerator of this process: CUDA, ROCm (device type cuda), XPU, NPU, MPS, ...

Everything goes through `torch.accelerator` and the device's own module, which have the same interface for all devices.
CUDA-only features are used only in the files that tests/test_accelerators.py lists.
"""

import gc
from typing import Any

import torch
import torch.distributed as dist

from shardkit.distributed import xla
from shardkit.errors import MachineError

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
    """Number of accelerators visible to this process."""
    return torch.accelerator.device_count()


def take(index: int) -> torch.device:
    """The accelerator with this index, made the current device of this process."""
    device = torch.device(kind() or "cpu", index)
    torch.accelerator.set_device_index(index)
    return device


def current(kind: str) -> torch.device:
    """This process's current device of a kind (`cpu`, `cuda`, ...)."""
    device = torch.device(kind)
    return device if kind == "cpu" else torch.device(kind, _module(device).current_device())


def is_used() -> bool:
    """Whether this process has initialized its accelerator. Asks no driver: CUDA's does not work in a process that is
    forked after that."""
    if xla.is_started():
        return True
    return _answers("is_initialized")


def finish() -> None:
    """Waits for what this process has begun on its accelerator, and raises what failed there; does nothing where it has
    used none."""
    if is_used() and not xla.is_started():
        torch.accelerator.synchronize()


def finish_stream() -> None:
    """Waits for what this process has begun on its current stream, such as copies to host memory."""
    torch.accelerator.current_stream().synchronize()


def is_lost_after_fork() -> bool:
    """For a forked process: whether it cannot use the accelerator, since the process it was forked from has initialized
    it, or has only asked the driver (torch.cuda.is_available)."""
    return _answers("_is_in_bad_fork")


def backend_for(device: torch.device) -> str:
    """The process group backend for this kind of device: gloo for CPU tensors, and the device's own backend.

    torch also finds a backend that an extension has registered for its device. MachineError where there is none.
    """
    if device.type in ("cpu", "xla") or device.type in ALONE:
        return "gloo"
    if (own := own_backend(device.type)) is None:
        raise MachineError(
            f"this machine: torch has no collectives for {device.type} devices (got no backend registered for them); "
            "import the package that registers one before the Accelerator is made, train with one process "
            "(distributed_type: NO), or set use_cpu: true."
        )
    return f"cpu:gloo,{device.type}:{own}"


def own_backend(kind: str) -> str | None:
    """The name of the backend for tensors on this kind of device."""
    return dist.Backend.default_device_backend_map.get(kind)


def name_of(device: torch.device) -> str:
    """The hardware's name, where the device module has one; else the device type."""
    if device.type == "xla":
        return xla.name_of_hardware()
    tell = getattr(_module(device), "get_device_name", None) if device.type != "cpu" else None
    return str(tell(device)) if tell is not None else device.type


def identity(device: torch.device) -> str:
    """The hardware's own number, equal in all processes that see it; empty where the device has none."""
    return str(getattr(_properties(device), "uuid", ""))


def pci_address(device: torch.device) -> str | None:
    """Where the device is attached, as in the kernel's files: 0000:3b:00.0; None where it does not tell."""
    found = _properties(device)
    if not hasattr(found, "pci_bus_id"):
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def total_bytes(device: torch.device) -> int:
    """The device's memory; 0 where it does not tell, or shares the host's."""
    return int(getattr(_properties(device), "total_memory", 0))


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None where the device has none, or does not tell."""
    tell = getattr(_module(device), "get_device_capability", None) if device.type == "cuda" else None
    return None if tell is None else tell(device)


def architecture(device: torch.device) -> str:
    """The architecture of an AMD GPU: `gfx942`."""
    return str(_module(device).get_device_properties(device).gcnArchName).partition(":")[0]


def peak_bytes(device: torch.device) -> int:
    """Peak memory of tensors on the device so far."""
    if device.type == "xla":
        return 0
    if device.type == "mps":  # its allocator records no peak; this is what it has taken from the system
        return int(_module(device).driver_allocated_memory())
    return torch.accelerator.max_memory_allocated(device)


def empty_cache() -> None:
    """Releases cached memory to the device; does nothing without one."""
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.is_available():
        return
    if found.type == "mps":  # torch.accelerator's raises there before torch 2.14 (pytorch/pytorch#186430)
        _module(found).empty_cache()
    else:  # the module of a device that an extension registers may lack it
        torch.accelerator.empty_cache()


def collect_garbage() -> None:
    """Frees what nothing refers to any more, in this process and on the device."""
    gc.collect()
    empty_cache()


def can_pin() -> bool:
    """Whether host memory can be pinned for faster copies to the accelerator."""
    return kind() not in (None, "xla", *ALONE)


def random_state() -> tuple[str, torch.Tensor] | None:
    """(the accelerator's kind, its generator state); None without one, and in a process that has not used it, such as
    one on the CPU of a machine with GPUs."""
    found = kind()
    if found == "xla":
        return found, xla.random_state()
    if found is None:
        return None
    module = _module(torch.device(found))
    is_initialized = getattr(module, "is_initialized", lambda: True)()
    return (found, module.get_rng_state()) if is_initialized else None


def set_random_state(state: torch.Tensor) -> None:
    """Sets the state of the accelerator's generator; the state must come from the same kind of device."""
    if kind() == "xla":
        xla.set_random_state(state)
        return
    _module(torch.device(kind() or "cpu")).set_rng_state(state)


def draws_by_offset(device: torch.device) -> bool:
    """Whether torch draws parts of sharded tensors there: it moves the generator's offset, which CUDA's state has, in
    16 bytes with the seed. Of a device that is only simulated it is not asked."""
    if device.type == "cpu":
        return False
    found = random_state()
    return found is None or found[0] != device.type or found[1].numel() == 16


def _answers(question: str) -> bool:
    """Whether the accelerator's module has this function, and it says yes."""
    found = torch.accelerator.current_accelerator()
    return found is not None and bool(getattr(_module(found), question, lambda: False)())


def _properties(device: torch.device) -> Any:
    """What the device's module tells of it; None where that tells nothing."""
    tell = getattr(_module(device), "get_device_properties", None)
    return None if tell is None else tell(device)


def _module(device: torch.device) -> Any:
    """The device's module: `torch.cuda`, `torch.xpu`, ..."""
    return torch.get_device_module(device)
