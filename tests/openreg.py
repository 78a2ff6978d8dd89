"""PyTorch's test extension torch_openreg: a device of an extension, whose memory is protected host memory.

It has no collectives that move data, its storages cannot be resized, its attention computes nothing, and its module
lacks what FSDP2 asks of a device's: all are added here.
"""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).parent / "scripts" / "collectives_through_host.cpp"


def prepare() -> None:
    """Makes FSDP2 and several ranks possible on the device in this process."""
    module: Any = torch.get_device_module("openreg")
    names = {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": torch.accelerator.current_stream,
        "stream": lambda stream: stream or nullcontext(),
        "synchronize": torch.accelerator.synchronize,
    }
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)
    built().attend_by_operators()
    resize = torch.UntypedStorage.resize_
    torch.UntypedStorage.resize_ = lambda storage, size: _resize(storage, size, resize)  # type: ignore[method-assign]
    dist.Backend.register_backend("through_host", _through_host, devices=["openreg"])
    dist.Backend.default_device_backend_map["openreg"] = "through_host"


def _resize(storage: torch.UntypedStorage, size: int, resize: Any) -> torch.UntypedStorage:
    """`storage.resize_(size)`, on this device, too."""
    if storage.device.type != "openreg":
        return resize(storage, size)
    built().resize(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size)
    return storage


def _through_host(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return built().through_host(dist.ProcessGroupGloo(store, rank, size, timeout))


def built() -> Any:
    """The backend's module; compiled once, which takes a minute."""
    from torch.utils.cpp_extension import load

    flags = ["-O0", "-w", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED"]
    return load(SOURCE.stem, [str(SOURCE)], extra_cflags=flags, with_cuda=False)
