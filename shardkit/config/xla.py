"""What PyTorch/XLA (TPU) does of a configuration, and what it has no counterpart for. Its name for one rank that
drives all devices of a machine is SPMD; shardkit trains on TPUs in no other way."""

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from shardkit.config.meaning import eight_bits, reshards_after_forward, xla_compute_dtype
from shardkit.config.meaning import shards_on_xla as shards
from shardkit.config.schema import Config, ShardingStrategy

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD)
"""Those that have a counterpart."""


def recomputes(config: Config) -> bool:
    """Whether activations are computed again in backward."""
    return config.xla_fsdp_grad_ckpt or config.fsdp.activation_checkpointing


def problems(config: Config) -> list[str]:
    """Settings that PyTorch/XLA has no counterpart for, in words; none in other modes."""
    if config.mode != "xla":
        return []
    return [f"distributed_type XLA: {text}" for text in _refused(config)]


def _refused(config: Config) -> Iterator[str]:
    strategy, known = config.fsdp.sharding_strategy, ", ".join(one.value for one in STRATEGIES)
    if config.xla and strategy not in STRATEGIES:
        yield (
            "fsdp_sharding_strategy: the compiler decides when gathered parameters are freed "
            f"(got {strategy.value}); write one of {known}."
        )
    elif config.xla and shards(config) and not reshards_after_forward(config.fsdp):
        yield (
            "fsdp_reshard_after_forward: the compiler decides when gathered parameters are freed (got false); "
            "leave it out."
        )
    if config.fsdp.offload_params:
        yield "fsdp_offload_params: parameters stay on the devices (got true); leave it out."
    if config.shardkit.offload_optimizer:
        yield "shardkit.offload_optimizer: state stays on the devices (got true); leave it out."
    if "fp16" in (config.mixed_precision, config.shardkit.precision.param_dtype):
        yield "mixed_precision: fp16 and its loss scaling are not for TPUs (got fp16); write bf16."
    if eight_bits(config):
        yield f"mixed_precision: {config.mixed_precision} is for GPUs (got XLA); write bf16."
    if config.shardkit.precision.reduce_dtype not in (None, "fp32"):
        yield (
            "shardkit.precision.reduce_dtype: the compiler reduces gradients in the dtype that they have "
            f"(got {config.shardkit.precision.reduce_dtype}); leave it out."
        )
    if config.shardkit.compile:
        yield "shardkit.compile: XLA compiles every step by itself (got true); leave it out."
    if config.shardkit.recompute != "blocks":
        got = config.shardkit.recompute
        yield f"shardkit.recompute: only whole blocks are computed again (got {got}); write blocks."
    if config.shardkit.ddp.comm_hook != "no":
        hook = config.shardkit.ddp.comm_hook
        yield f"shardkit.ddp.comm_hook: gradients are sent as they are (got {hook}); leave it out."
    yield from _refused_settings(config)


def _refused_settings(config: Config) -> Iterator[str]:
    """Of PyTorch/XLA's own settings only the compute dtype means something in SPMD."""
    for name, value in config.xla_fsdp_settings.items():
        if name != "compute_dtype":
            yield f"xla_fsdp_settings: {name} is a setting of one process a device (got {value!r}); leave it out."
        elif xla_compute_dtype(config) is None:
            yield f"xla_fsdp_settings: compute_dtype is not one that TPUs compute in (got {value!r}); write bfloat16."
        elif xla_compute_dtype(config) == "fp32" and config.mixed_precision == "bf16":
            yield (
                "xla_fsdp_settings: compute_dtype says float32 and mixed_precision bf16 (got both); keep one of them."
            )


def installed_problem() -> str | None:
    """As `versions_problem`, of what is installed here."""
    return versions_problem(*(_version(name) for name in ("torch", "torch_xla")))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions_problem(torch: str | None, torch_xla: str | None) -> str | None:
    """What is wrong with the installed packages of these versions, None where one is missing; None: nothing."""
    how = "pip install 'shardkit[tpu]' in an environment of its own (docs/how-to/tpu.md)"
    if torch_xla is None:
        return f"distributed_type XLA needs the package torch_xla, which is not installed; {how}."
    if torch is None or torch.split(".")[:2] != torch_xla.split(".")[:2]:
        return (
            f"distributed_type XLA: torch_xla works with the torch of its own version (got torch_xla {torch_xla} and "
            f"torch {torch}); {how}."
        )
    return None


def variables(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """What torch_xla reads of the environment before it starts, for this configuration; what is `inherited` stays."""
    found = {"PJRT_DEVICE": "TPU"}
    if config.use_cpu:
        found = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(config.processes_per_machine)}
    if config.downcast_bf16:
        found["XLA_DOWNCAST_BF16"] = "1"
    return {name: value for name, value in found.items() if name not in inherited}
