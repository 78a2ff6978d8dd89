"""When a question applies, and which answers are possible."""

from collections.abc import Callable

from shardkit.config.schema import ShardingStrategy
from shardkit.plan import devices
from shardkit.wizard.situation import ELSEWHERE, SEVERAL, SLURM, Situation


def several(s: Situation) -> bool:
    """More than one machine."""
    return s.machines > 1


def may_be_elastic(s: Situation) -> bool:
    """Machines may leave and join the run."""
    return several(s) and not s.on_tpu


def counts_machines(s: Situation) -> bool:
    """There may be more than one machine."""
    return s.where in {SEVERAL, SLURM} or pod(s) or (s.on_tpu and s.base.num_machines > 1)


def launches_on_each(s: Situation) -> bool:
    """Several machines, on each of which the launch command is run; a pod's are started by one."""
    return several(s) and not pod(s)


def machines_are_asked(s: Situation) -> bool:
    """Not within a SLURM job, which sets the number of machines."""
    return not (s.where == SLURM and s.is_in_slurm_job)


def chooses_device(s: Situation) -> bool:
    """Whether GPUs or CPUs train is open."""
    return s.where in {ELSEWHERE, SEVERAL, SLURM}


def no_gpu_here(s: Situation) -> bool:
    """No GPU on this machine to infer those of the others from."""
    return not s.gpus


def gpu_is_unknown(s: Situation) -> bool:
    """The GPUs are on another machine and cannot be detected."""
    return not s.on_cpu and (s.where == ELSEWHERE or (s.where in {SEVERAL, SLURM} and not s.gpus))


def another_gpu(s: Situation) -> bool:
    """A GPU that is not in the list."""
    return gpu_is_unknown(s) and s.answers.get("gpu") == "other"


def shards(s: Situation) -> bool:
    """FSDP runs."""
    return s.shards


def may_offload_state(s: Situation) -> bool:
    """The optimizer's state could be in host memory alone."""
    return s.shards and not s.on_cpu and not s.answers.get("fsdp.offload_params")


def each_detail(s: Situation) -> bool:
    """The details of FSDP are asked one by one."""
    return s.answers.get("details") == "each"


def by_class(s: Situation) -> bool:
    """Units are classes."""
    return wraps(s) and s.answers["fsdp.auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"


def by_size(s: Situation) -> bool:
    """Units are found by their number of parameters."""
    return wraps(s) and s.answers["fsdp.auto_wrap_policy"] == "SIZE_BASED_WRAP"


def wraps(s: Situation) -> bool:
    """Whether the model is divided into units, by FSDP or PyTorch/XLA's FSDP."""
    return s.shards or tpu_fsdp(s)


def splits(s: Situation) -> bool:
    """More than one process, and torch's strategies apply."""
    return s.world_size > 1 and not s.on_tpu


def many(s: Situation) -> bool:
    """More than one process."""
    return s.world_size > 1


def tpu(s: Situation) -> bool:
    """On a TPU."""
    return s.on_tpu


def not_tpu(s: Situation) -> bool:
    """On GPUs or CPUs."""
    return not s.on_tpu


def pod(s: Situation) -> bool:
    """On several TPU machines."""
    return s.on_tpu and bool(s.answers.get("tpu_use_cluster"))


def tpu_fsdp(s: Situation) -> bool:
    """PyTorch/XLA's FSDP runs."""
    return s.on_tpu and bool(s.answers.get("xla"))


def never(s: Situation) -> bool:
    """Only under "Advanced"."""
    return False


WORDS: dict[Callable[[Situation], bool], str] = {
    tpu: "TPU",
    counts_machines: "several machines, SLURM, TPU pod",
    several: "several machines",
    gpu_is_unknown: "GPUs of another machine",
    another_gpu: "another GPU",
    splits: "more than one process, not on TPU",
    shards: "strategies 1, 2, 4, 5",
    may_offload_state: "strategies 1, 2, 4, 5 on accelerators, without CPU offload",
    pod: "TPU pod",
    wraps: "strategies 1, 2, 4, 5",
    by_class: "TRANSFORMER_BASED_WRAP",
    by_size: "SIZE_BASED_WRAP",
    not_tpu: "not on TPU",
    may_be_elastic: "several machines, not on TPU",
    launches_on_each: "several machines",
    many: "more than one process",
    tpu_fsdp: "TPU with FSDP",
}
"""How the documentation says of a question that applies in these situations when it is asked."""


def why_not(s: Situation, strategy: ShardingStrategy) -> str:
    """Why a strategy cannot be chosen; "" where it can. The strategy of an edited file is always possible."""
    if s.has_base and s.base.fsdp.sharding_strategy is strategy and s.base.num_machines == s.machines:
        return ""
    if not strategy.is_hybrid or s.base.shardkit.mesh.replicate_size > 1 or s.base.shardkit.mesh.shard_size > 1:
        return ""
    if s.machines < 2:
        return "needs 2 machines"
    return "needs 2 processes on each machine" if s.per_machine < 2 else ""


def device_elsewhere(s: Situation) -> devices.Device | None:
    """The other machines' GPU; None where those of this machine are used. Nothing is known of one that is not named."""
    if s.on_cpu or s.on_tpu or (s.gpus and s.where != ELSEWHERE):
        return None
    return devices.find(s.planned_device) if s.planned_device else devices.Device("GPU", None, {})


def gpu_without_bf16(s: Situation) -> str | None:
    """The name of a GPU that will be used and does not support bf16; None if there is none."""
    if s.on_tpu:
        return None
    if (elsewhere := device_elsewhere(s)) is not None:
        return elsewhere.name if elsewhere.lacks_bf16 else None
    return next((device.name for device in s.hardware.devices if not device.has_bf16), None)


def has_eight_bits(s: Situation, dtype: str) -> bool:
    """Whether all GPUs that will be used multiply in fp8 or mxfp8."""
    if s.on_cpu or s.on_tpu:
        return False
    if (elsewhere := device_elsewhere(s)) is not None:
        return bool(elsewhere.multiplies_in(dtype))
    return bool(s.hardware.devices) and all(device.multiplies_in(dtype) for device in s.hardware.devices)
