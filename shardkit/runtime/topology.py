"""Rank, world size and device: the properties that `Accelerator` and `accelerator.state` share."""

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config.schema import DistributedType
from shardkit.runtime.run import Run
from shardkit.sharding.mesh import replica_of, shard_of


class RankNumbers:
    """What follows from a rank's numbers, which a subclass provides."""

    num_processes: int
    process_index: int
    local_process_index: int

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's first rank."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1


def distributed_type_of(mode: str, world_size: int, device: torch.device) -> DistributedType:
    """What runs in this mode, by the names of the configuration."""
    if mode == "xla" or device.type == "xla":
        return DistributedType.XLA
    if mode == "fsdp":
        return DistributedType.FSDP
    if mode == "single" or world_size == 1:
        return DistributedType.NO
    return DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU


class Topology(RankNumbers):
    """The topology of a run."""

    _run: Run

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP, MULTI_GPU or MULTI_CPU (DDP), NO (one process without sharding), XLA: what runs."""
        config = self._run.config
        return distributed_type_of(config.mode, config.num_processes, self._run.device)

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """Number of ranks, over all machines (world size)."""
        return self._run.process.world_size

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """This rank's number, from 0."""
        return self._run.process.rank

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """This rank's number among those of its machine, from 0."""
        return self._run.process.local_rank

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._run.device

    @property
    def mixed_precision(self) -> str:
        """no, fp16, bf16, fp8 or mxfp8: what runs."""
        return self._run.config.mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded: strategies 1, 2, 4 and 5."""
        return self._run.config.mode == "fsdp"

    @property
    def deepspeed_plugin(self) -> None:
        """None: shardkit does not run DeepSpeed."""
        return

    @property
    def parallelism_config(self) -> None:
        """None: see `torch_device_mesh`; the mesh is set by fsdp_sharding_strategy and shardkit.mesh."""
        return

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one rank."""
        return self.use_distributed

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The ranks as (replicate, shard), or (shard); None where nothing is sharded."""
        return self._run.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded by FSDP2, whose parameters are DTensors."""
        return self.is_fsdp2

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this rank belongs to."""
        return replica_of(self._run.mesh, self.process_index)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank's shard within its replica."""
        return shard_of(self._run.mesh)

    @property
    def tensor_parallel_rank(self) -> int:
        """0: shardkit has no tensor parallelism."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: shardkit has no pipeline parallelism."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """Index of this rank among those that share its sequences, and of its slice."""
        return self._run.region.group.rank
