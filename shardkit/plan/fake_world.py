"""A world of any number of ranks in one process: collectives do nothing, tensors have shapes and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config.schema import Config
from shardkit.runtime.mesh import build_mesh
from shardkit.runtime.process import Process


@contextmanager
def fake_world(config: Config, world_size: int, ranks_per_machine: int) -> Iterator[tuple[Process, DeviceMesh | None]]:
    """Rank 0 of the world, and its mesh; inside, every new tensor is fake.

    The mesh is built before: it holds real rank numbers. Always on the CPU, where every build of torch can follow
    autograd on fake tensors. DDP's reducer cannot, so under DDP (and alone) this rank is a world of one; what DDP would
    allocate is added by `training_step`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch keeps it there; c10d imports it itself

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        size = world_size if config.mode == "fsdp" else 1
        process = Process(0, 0, size, min(ranks_per_machine, size), torch.device("cpu"), "fake")
        mesh = build_mesh(config, process)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield process, mesh
    finally:
        dist.destroy_process_group()
