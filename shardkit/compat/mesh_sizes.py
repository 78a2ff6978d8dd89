"""Accelerate's ParallelismConfig: how the ranks are divided into replicas, shards, and groups that share sequences."""

from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any

from shardkit import env
from shardkit.errors import UsageError
from shardkit.log import get_logger

if TYPE_CHECKING:
    from shardkit.runtime.run import Run

log = get_logger(__name__)

AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
"""In the order of the mesh."""
_OF_MESHES = {"dp": "dp_dim_names", "dp_shard_cp": "dp_shard_cp_dim_names", "dp_cp": "dp_cp_dim_names"}
"""The axes that Accelerate's mesh also has as one, by its name."""


@dataclass
class TorchContextParallelConfig:
    """How ranks exchange keys and values in Accelerate. It has no effect: shardkit exchanges slices for heads."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        self.cp_comm_strategy = self.cp_comm_strategy or env.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY") or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise UsageError(
                "TorchContextParallelConfig: cp_comm_strategy is not one of the choices (got "
                f"{self.cp_comm_strategy}); use allgather or alltoall."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """What DeepSpeed asks of sequences and attention. It has no effect: lengths may vary, and attention is sdpa."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None


@dataclass
class ParallelismConfig:
    """The sizes of the mesh: replicas of the model, ranks per replica, and ranks that share each sequence. Raises
    UsageError for tensor parallelism.

    Context parallelism (`cp_size`) is shardkit's, which is Ulysses' exchange. DeepSpeed's sequence parallelism is the
    same, so that `sp_size` is taken for `cp_size`, and shown so.
    """

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
        for axis in AXES:
            name = f"{axis}_size"
            if getattr(self, name) is None:
                setattr(self, name, int(env.get(f"PARALLELISM_CONFIG_{name.upper()}") or 1))
        for name, known in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            given = getattr(self, name) or env.get(f"PARALLELISM_CONFIG_{name.upper()}") or known
            setattr(self, name, given)
            if given != known:
                raise UsageError(f"ParallelismConfig: {name} is not one of Accelerate's (got {given}); use {known}.")
        if problem := self._problem():
            raise UsageError(f"ParallelismConfig: {problem}")
        self.is_of_deepspeed = self._size("sp") > 1
        """Whether the size of the groups was given as DeepSpeed's."""
        if self.is_of_deepspeed:
            self.cp_size, self.sp_size = self.sp_size, 1
        if self.cp_enabled and self.cp_handler is None:
            self.cp_handler = TorchContextParallelConfig()

    def _problem(self) -> str | None:
        if small := [f"{axis}_size={self._size(axis)}" for axis in AXES if self._size(axis) < 1]:
            return f"sizes are at least 1 (got {', '.join(small)}); leave out what is not used."
        if self._size("tp") > 1:
            return (
                f"tensor parallelism is not supported (got tp_size={self.tp_size}); use dp_shard_size, "
                "dp_replicate_size and cp_size."
            )
        if self._size("cp") > 1 and self._size("sp") > 1:
            return f"cp_size and sp_size are the same here (got {self.cp_size} and {self.sp_size}); give one of them."
        return None

    def _size(self, axis: str) -> int:
        return int(getattr(self, f"{axis}_size"))

    def shardkit_settings(self) -> dict[str, Any]:
        """FSDP over the shard axis; a hybrid strategy if there are replicas, too. Ranks that share sequences are among
        those of a shard axis, or of the strategy that is configured."""
        copies, shards, context = (self._size(axis) for axis in ("dp_replicate", "dp_shard", "cp"))
        said: dict[str, Any] = {} if context == 1 else {"shardkit.mesh.context_size": context}
        if shards == 1:
            if copies > 1 and not self.is_of_deepspeed:  # DeepSpeed's own settings say what is sharded
                said |= {"distributed_type": "FSDP", "fsdp_config.fsdp_sharding_strategy": "NO_SHARD"}
            return said
        said["distributed_type"] = "FSDP"
        if copies > 1:
            said |= {
                "fsdp_config.fsdp_sharding_strategy": "HYBRID_SHARD",
                "shardkit.mesh.replicate_size": copies,
                "shardkit.mesh.shard_size": shards * context,
            }
        return said

    def to_json(self) -> dict[str, Any]:
        """The sizes and backends."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name.endswith(("_size", "_backend"))}

    def _enabled(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._size(axis) > 1]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the axes that are larger than 1."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes along which ranks read different data."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which ranks read the same data."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes over which a loss is averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes over which the model is sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of FSDP's mesh: those of the shards are one."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups that share sequences, that read different data."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Number of ranks that read the same data."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    @property
    def total_size(self) -> int:
        """Number of ranks."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there is more than one replica."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the model is sharded over ranks that read different data."""
        return self._size("dp_shard") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether ranks share sequences."""
        return self._size("cp") > 1

    tp_enabled = sp_enabled = False

    def build_device_mesh(self, device_type: str) -> Any:
        """A mesh of the axes that are larger than 1, over all ranks; several of them also as one (`dp`, `dp_shard_cp`,
        `dp_cp`). None where there is none. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        names = self._enabled(*AXES)
        if not names:
            return None
        mesh = init_device_mesh(device_type, tuple(map(self._size, names)), mesh_dim_names=tuple(names))
        for name, of_several in _OF_MESHES.items():
            if axes := getattr(self, of_several):
                mesh[tuple(axes)]._flatten(name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh. Given a device type, it is created at the first use, which is collective."""
        if self.device_mesh is None and device_type is not None:
            self.device_mesh = self.build_device_mesh(device_type)
        return self.device_mesh


def of_run(given: ParallelismConfig | None, run: "Run") -> ParallelismConfig | None:
    """The config of a run: the given one, or a new one where ranks share sequences; completed with the sizes that it
    does not say. Raises UsageError where they do not make up the ranks."""
    context, ranks = run.region.group.size, run.process.world_size
    if context == 1:
        return given
    config = given or ParallelismConfig(1, 1, 1, context, sp_size=1)
    if not config.cp_enabled:
        config.cp_size, config.cp_handler = context, config.cp_handler or TorchContextParallelConfig()
    if config.data_parallel_size == 1:
        config.dp_replicate_size, config.dp_shard_size = _data_sizes(run, context)
    if config.total_size != ranks:
        sizes = {axis: config._size(axis) for axis in ("dp_replicate", "dp_shard", "cp")}
        got = " x ".join(f"{axis}_size={size}" for axis, size in sizes.items())
        raise UsageError(
            f"ParallelismConfig: the sizes do not make up the ranks (got {got} = {prod(sizes.values())} for {ranks} "
            f"ranks, {context} of which share each sequence); leave out the dp sizes, which then follow."
        )
    if given is not None and given.is_of_deepspeed and run.process.is_main:
        log.info(
            "ParallelismConfig: sp_size=%d is shardkit.mesh.context_size here, and shown as cp_size. Loaders yield "
            "whole sequences with their labels, without shift_labels; the Trainer splits them, and other loops do it "
            "with accelerator.maybe_context_parallel.",
            context,
        )
    return config


def _data_sizes(run: "Run", context: int) -> tuple[int, int]:
    """Replicas, and ranks of a replica that read different data."""
    shards = 1 if run.mesh is None else run.mesh.shape[-1]
    if shards % context:
        return run.readers, 1
    return run.process.world_size // shards, shards // context
