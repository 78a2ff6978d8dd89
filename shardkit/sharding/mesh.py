"""Which ranks share one copy of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardkit.config.schema import Config
from shardkit.errors import ConfigError

if TYPE_CHECKING:
    from shardkit.distributed.process import Process

REPLICATE, SHARD = "replicate", "shard"


def build_mesh(config: Config, process: Process) -> DeviceMesh | None:
    """The mesh to shard over: axes (shard) or (replicate, shard); None where nothing is sharded (one process, DDP).

    Collective: every rank must call it.
    """
    if config.mode != "fsdp":
        return None
    if not config.fsdp.sharding_strategy.is_hybrid:
        return init_device_mesh(process.device.type, (process.world_size,), mesh_dim_names=(SHARD,))
    sizes = hybrid_sizes(config, process.world_size, process.local_world_size)
    return init_device_mesh(process.device.type, sizes, mesh_dim_names=(REPLICATE, SHARD))


def hybrid_sizes(config: Config, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(replicate, shard) sizes of the hybrid strategies: what the config says, else shards inside a machine.

    Raises ConfigError where the two do not make up the world.
    """
    per_machine = local_world_size
    if per_machine == world_size and config.num_machines > 1 and world_size % config.num_machines == 0:
        per_machine = world_size // config.num_machines
    replicate, shard = config.shardkit.mesh.replicate_size, config.shardkit.mesh.shard_size
    shard = shard or (world_size // replicate if replicate else per_machine)
    replicate = replicate or world_size // max(1, shard)
    if replicate * shard != world_size:
        raise ConfigError(
            f"shardkit.mesh: replicate_size x shard_size must be the number of ranks "
            f"(got {replicate} x {shard} on {world_size} ranks); set one of them and leave the other 0."
        )
    return replicate, shard
