"""PyTorch's test extension torch_openreg: a device of an extension, whose memory is protected host memory.

It has no collectives that move data, and its module lacks what FSDP2 asks of a device's; both are added here.
"""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).parent / "scripts" / "collectives_through_host.cpp"


def prepare() -> None:
    """Makes several ranks possible on the device in this process."""
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
    dist.Backend.register_backend("through_host", _through_host, devices=["openreg"])
    dist.Backend.default_device_backend_map["openreg"] = "through_host"


def _through_host(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return built().through_host(dist.ProcessGroupGloo(store, rank, size, timeout))


def built() -> Any:
    """The backend's module; compiled once, which takes a minute."""
    from torch.utils.cpp_extension import load

    flags = ["-O0", "-w", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED"]
    return load(SOURCE.stem, [str(SOURCE)], extra_cflags=flags, with_cuda=False)
