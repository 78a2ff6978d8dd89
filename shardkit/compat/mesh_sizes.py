"""Accelerate's ParallelismConfig: the replicate and shard sizes of the mesh."""

from dataclasses import dataclass, fields
from typing import Any

from shardkit import env
from shardkit.errors import UsageError


@dataclass
class ParallelismConfig:
    """The sizes of the mesh: replicas of the model, and ranks per replica. Other axes raise UsageError."""

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    device_mesh: Any = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            if getattr(self, name) is None:
                setattr(self, name, int(env.get(f"PARALLELISM_CONFIG_{name.upper()}") or 1))
        beyond = [f"{name}={getattr(self, name)}" for name in ("tp_size", "cp_size", "sp_size") if self._size(name) > 1]
        if beyond:
            raise UsageError(
                f"ParallelismConfig: tensor, context and sequence parallelism are not supported (got "
                f"{', '.join(beyond)}); use dp_replicate_size and dp_shard_size."
            )

    def _size(self, name: str) -> int:
        return int(getattr(self, name) or 1)

    def shardkit_settings(self) -> dict[str, Any]:
        """FSDP over the shard axis; a hybrid strategy if there are replicas, too."""
        copies, shards = self._size("dp_replicate_size"), self._size("dp_shard_size")
        if shards <= 1:
            return {} if copies <= 1 else {"distributed_type": "FSDP", "fsdp_config.fsdp_sharding_strategy": "NO_SHARD"}
        if copies <= 1:
            return {"distributed_type": "FSDP"}
        return {
            "distributed_type": "FSDP",
            "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD",
            "shardkit.mesh.replicate_size": copies,
            "shardkit.mesh.shard_size": shards,
        }

    def to_json(self) -> dict[str, Any]:
        """The sizes and backends."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name.endswith(("_size", "_backend"))}

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the axes that are larger than 1."""
        return [name for name in ("dp_replicate", "dp_shard") if self._size(f"{name}_size") > 1]

    # Along each of them ranks read different data, and a loss is averaged; FSDP's mesh has them all.
    dp_dim_names = dp_cp_dim_names = fsdp_dim_names = active_mesh_dims

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which ranks read the same data: none."""
        return []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes over which the model is sharded."""
        return [name for name in self.active_mesh_dims if name == "dp_shard"]

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks. They all read different data."""
        return self._size("dp_replicate_size") * self._size("dp_shard_size")

    total_size = data_parallel_size
    non_data_parallel_size = 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one replica."""
        return self._size("dp_replicate_size") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the model is sharded."""
        return self._size("dp_shard_size") > 1

    tp_enabled = cp_enabled = sp_enabled = False

    def build_device_mesh(self, device_type: str) -> Any:
        """A mesh of the axes that are larger than 1, over all ranks. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        names = self.active_mesh_dims
        if names and self.device_mesh is None:
            sizes = tuple(self._size(f"{name}_size") for name in names)
            self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names))
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh. Given a device type, it is created at the first use, which is collective."""
        return self.device_mesh if device_type is None else self.build_device_mesh(device_type)
