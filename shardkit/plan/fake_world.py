"""A world of any size in one process: collectives do nothing, and tensors have shapes but no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config.schema import Config
from shardkit.distributed.control import ControlGroup
from shardkit.distributed.process import Process
from shardkit.sharding.context_parallel.groups import ContextGroup
from shardkit.sharding.context_parallel.region import Region
from shardkit.sharding.mesh import build_mesh


class _FakeTensors(FakeTensorMode):
    def __deepcopy__(self, memo: object) -> _FakeTensors:
        """Itself. A deep copy of a fake tensor (nn.Transformer copies its layers) copies its mode too, and torch would
        convert the copy anew in each operator: storages of their own, counted in addition."""
        return self


def fake_tensors() -> FakeTensorMode:
    """A context in which every new tensor is fake; real tensors created elsewhere may be mixed in."""
    return _FakeTensors(allow_non_fake_inputs=True)


@contextmanager
def joined(config: Config, world_size: int, ranks_per_machine: int) -> Iterator[tuple[Process, DeviceMesh | None]]:
    """Rank 0 of the world, and its mesh; inside, every new tensor is fake.

    The mesh is built first, with real rank numbers. Always on the CPU, where every build of torch supports autograd on
    fake tensors. DDP's reducer does not, so under DDP (and for a single process) the world size is one, and DDP's
    buckets are added by `training_step`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its only place; c10d imports it from there too

    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)  # else torch checks each collective, which a fake group cannot answer
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        size = world_size if config.mode == "fsdp" else 1
        process = Process(0, 0, size, min(ranks_per_machine, size), torch.device("cpu"), "fake")
        mesh = build_mesh(config, process)
        with fake_tensors():
            yield process, mesh
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(level)


@contextmanager
def shared_sequences(config: Config) -> Iterator[Region]:
    """The region in which rank 0 has its slices of sequences, inside of `joined`. Its group is of the world's ranks,
    also where the process is alone."""
    size = config.shardkit.mesh.context_size
    group = ContextGroup(size, 0, dist.new_group(list(range(size)))) if size > 1 else ContextGroup()
    region = Region(group, ControlGroup())
    try:
        yield region
    finally:
        region.note_forward()  # outside of it, so that backwards to come ask no group that is gone


def with_fake_tensors(model: nn.Module) -> nn.Module:
    """The model, its meta tensors replaced by fake ones on the CPU, in place; tied parameters stay tied."""
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            empty = torch.empty_like(tensor, device="cpu", requires_grad=False)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]

    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = fake(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            module._buffers[name] = fake(buffer)
    return model


def keep_in_place(model: nn.Module) -> None:
    """Replaces the model's `to` by a no-op: the model is on the CPU already, and torch refuses to swap fake parameters
    that have weak references."""

    def stay(*_: object, **__: object) -> nn.Module:
        return model

    model.to = stay  # type: ignore[method-assign]
