"""Values derived from a configuration: mesh sizes, resharding, dtypes.

Pure functions of a Config (and the world size where needed), used by checks, launch, plan and runtime. The engine is
`Config.mode`.
"""

from dataclasses import dataclass
from typing import Literal

from shardkit.config.schema import Config, DistributedType, Dtype, FsdpConfig, MeshConfig, ShardingStrategy
from shardkit.errors import ConfigError

# Gradients of these dtypes are accumulated without a cast, regardless of the configuration.
WIDE = {"float64", "complex64", "complex128"}

_IMPLIED: dict[str, Dtype | None] = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "mxfp8": "bf16"}
_XLA_DTYPES: dict[str, Dtype] = {"float32": "fp32", "fp32": "fp32", "bfloat16": "bf16", "bf16": "bf16"}


@dataclass(frozen=True)
class MeshSizes:
    """`replicate` replicas of the model, each sharded over `shard` ranks."""

    replicate: int
    shard: int


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a run. `param`: compute dtype; None: the parameters' own dtype.

    `reduce`: dtype of gradient reduction, except for WIDE gradients, which keep their dtype.
    """

    param: Dtype | None
    reduce: Dtype
    output: Dtype | None

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scale is needed (fp16)."""
        return self.param == "fp16"


def counts_devices(config: Config) -> bool:
    """Whether the number of ranks is open: one a device of the machines, since no setting says it."""
    return "num_processes" not in config.model_fields_set and config.distributed_type is not DistributedType.NO


def runs_on_cpu(config: Config) -> bool:
    """Whether the ranks train on the CPU."""
    return config.use_cpu or config.distributed_type is DistributedType.MULTI_CPU


def mesh_sizes(config: Config, world_size: int, ranks_per_machine: int) -> MeshSizes:
    """The mesh sizes, in any mode. ConfigError where given sizes do not match the world size.

    Hybrid strategies shard within a machine and replicate across machines, unless `shardkit.mesh` is set.
    """
    if config.mode != "fsdp":
        return MeshSizes(world_size, 1)
    if not config.fsdp.sharding_strategy.is_hybrid:
        return MeshSizes(1, world_size)
    return given_sizes(config.shardkit.mesh, world_size, ranks_per_machine)


def given_sizes(given: MeshConfig, world_size: int, ranks_per_machine: int) -> MeshSizes:
    """The sizes of a hybrid strategy; an unset size follows from the other, or from the machines."""
    per_machine = min(ranks_per_machine, world_size)
    shard = given.shard_size or (world_size // given.replicate_size if given.replicate_size else per_machine)
    replicate = given.replicate_size or world_size // max(1, shard)
    if replicate * shard != world_size:
        if given.replicate_size and given.shard_size:
            text = f"{replicate} replicas x {shard} ranks is not the world size (got {world_size}); set only one size"
        elif alone := given.replicate_size or given.shard_size:
            text = f"does not divide the number of ranks (got {alone} of {world_size}); choose a divisor"
        else:
            text = f"unset, so that the {shard} ranks of a machine make a shard group, which does not divide the number"
            text = f"{text} of ranks (got {world_size}); set shard_size to a divisor"
        raise ConfigError(f"shardkit.mesh: {text}.")
    return MeshSizes(replicate, shard)


def reshards_after_forward(fsdp: FsdpConfig) -> bool:
    """Whether units free their gathered parameters between forward and backward (strategies 1 and 4)."""
    chosen = fsdp.reshard_after_forward
    return fsdp.sharding_strategy.reshards_after_forward if chosen is None else chosen


def longest_wait_s(config: Config) -> float:
    """How long a rank waits for the others in a call that all must make: the error comes before those of the others."""
    return 0.9 * config.shardkit.launch.process_group_timeout_s


def dtypes(config: Config) -> Dtypes:
    """The configured dtypes; outputs under mixed precision and reduction are fp32 unless set."""
    section = config.shardkit.precision
    param = section.param_dtype or _IMPLIED[config.mixed_precision] or _but_fp32(xla_compute_dtype(config))
    return Dtypes(param, section.reduce_dtype or "fp32", section.output_dtype or ("fp32" if param else None))


def without_bf16(config: Config) -> Config:
    """The configuration as it is trained on devices that do not support bf16: in fp32."""
    return config.changed(mixed_precision="no", shardkit={"precision": {"param_dtype": None, "output_dtype": None}})


def without_shards(config: Config) -> Config:
    """The configuration of a model that is whole on every rank."""
    return config.changed(fsdp={"sharding_strategy": ShardingStrategy.NO_SHARD})


def with_strategy(config: Config, strategy: ShardingStrategy) -> Config:
    """The configuration under another strategy of FSDP."""
    fsdp = {"sharding_strategy": strategy, "reshard_after_forward": None}
    return config.changed(distributed_type=DistributedType.FSDP, fsdp=fsdp)


def eight_bits(config: Config) -> Literal["fp8", "mxfp8"] | None:
    """What Linear layers inside of blocks multiply in, where that is less than the compute dtype."""
    return config.mixed_precision if config.mixed_precision in ("fp8", "mxfp8") else None


def offloads_state(config: Config) -> bool:
    """Whether the optimizer's state alone is in host memory; with `fsdp_offload_params` parameters are, too."""
    offloads_all = config.mode == "fsdp" and config.fsdp.offload_params
    return config.shardkit.offload_optimizer and not (offloads_all or runs_on_cpu(config))


def shards_on_xla(config: Config) -> bool:
    """Whether parameters are spread over XLA devices; else each device has a whole copy, and a part of the batch."""
    return config.mode == "xla" and config.xla and config.fsdp.sharding_strategy is not ShardingStrategy.NO_SHARD


def xla_sizes(config: Config, devices: int, devices_per_machine: int) -> MeshSizes:
    """As `mesh_sizes`, of XLA devices."""
    if not shards_on_xla(config):
        return MeshSizes(devices, 1)
    if not config.fsdp.sharding_strategy.is_hybrid:
        return MeshSizes(1, devices)
    return given_sizes(config.shardkit.mesh, devices, devices_per_machine)


def xla_compute_dtype(config: Config) -> Dtype | None:
    """The `compute_dtype` of PyTorch/XLA's own settings; None where there is none, or it is none that TPUs have."""
    if config.mode != "xla":
        return None
    name = str(config.xla_fsdp_settings.get("compute_dtype", "")).removeprefix("torch.").lower()
    return _XLA_DTYPES.get(name)


def kept_accumulation(steps: int, split_batches: bool, full: int, present: int) -> int | None:
    """Micro-batches per step and rank that keep the global batch in an elastic run with `present` of its `full` ranks
    or machines, where `steps` are those with all of them; None: not a whole number. With `split_batches` they stay:
    fewer ranks share each batch."""
    if split_batches:
        return steps
    return None if steps * full % present else steps * full // present


def _but_fp32(dtype: Dtype | None) -> Dtype | None:
    """What parameters in fp32 have to be cast to."""
    return None if dtype == "fp32" else dtype
