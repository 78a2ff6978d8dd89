"""The device mesh: which ranks share one replica of the model."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.config.meaning import mesh_sizes
from shardkit.config.schema import Config
from shardkit.distributed import control
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from shardkit.distributed.process import Process

REPLICATE, SHARD = "replicate", "shard"


def build_mesh(config: Config, process: Process) -> DeviceMesh | None:
    """The mesh to shard over: axes (shard) or (replicate, shard); None without sharding (one process, DDP).

    Collective: every rank must call it. Raises ConfigError if the product of the sizes is not the world size, or the
    machines differ.
    """
    if config.mode != "fsdp":
        return None
    axes = _axes(config, process)
    mesh = init_device_mesh(process.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if not control.is_simulated():
        _set_timeout(mesh, timedelta(seconds=config.shardkit.launch.process_group_timeout_s))
    return mesh


def _axes(config: Config, process: Process) -> dict[str, int]:
    """The names of the mesh's axes, and the ranks along each."""
    if not config.fsdp.sharding_strategy.is_hybrid:
        return {SHARD: process.world_size}
    per_machine, world_size = _ranks_per_machine(config, process), process.world_size
    if per_machine == world_size and world_size % config.num_machines == 0:  # several machines, simulated on one
        per_machine = world_size // config.num_machines
    sizes = mesh_sizes(config, world_size, per_machine)
    return {REPLICATE: sizes.replicate, SHARD: sizes.shard}


def _ranks_per_machine(config: Config, process: Process) -> int:
    """The ranks on each machine. ConfigError on all ranks where machines differ (as torchrun may start them), and
    nothing else gives the shard groups their size."""
    given = config.shardkit.mesh
    if given.shard_size or given.replicate_size or control.is_simulated():
        return process.local_world_size
    found = process.control.exchange(process.local_world_size)
    if len({*found}) > 1:
        sizes = " and ".join(map(str, sorted({*found})))
        raise ConfigError(
            f"shardkit.mesh: unset, so that the ranks of a machine make a shard group, and machines have different "
            f"numbers of ranks (got {sizes}); start equally many on each, or set shard_size to a divisor of all."
        )
    return process.local_world_size


def _set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Gives the groups that the mesh has made the configured timeout: init_device_mesh takes none, and torch's default
    is half an hour."""
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if group is not dist.group.WORLD:
            distributed_c10d._set_pg_timeout(timeout, group)


def replica_of(mesh: DeviceMesh | None, rank: int) -> int:
    """The number of this rank's replica of the model; under DDP each rank has one."""
    if mesh is None:
        return rank
    return mesh.get_local_rank(REPLICATE) if REPLICATE in (mesh.mesh_dim_names or ()) else 0


def shard_of(mesh: DeviceMesh | None) -> int:
    """The number of this rank's shard of its replica."""
    return 0 if mesh is None else mesh.get_local_rank(SHARD)
