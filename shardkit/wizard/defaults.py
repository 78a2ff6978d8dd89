"""Defaults and their reasons: one function for each default that depends on the situation."""

from socket import gethostname

from shardkit.config.schema import ShardingStrategy
from shardkit.wizard import numbers
from shardkit.wizard.conditions import gpu_without_bf16, pod, why_not
from shardkit.wizard.question import Default
from shardkit.wizard.situation import ELSEWHERE, HERE, SEVERAL, SLURM, Situation


def where(s: Situation) -> Default:
    if s.is_in_slurm_job:
        return Default(SLURM, "this shell runs in a SLURM job")
    return Default(HERE, f"found here: {s.devices_text}")


def machines(s: Situation) -> Default:
    if s.where == SLURM and s.hardware.scheduler and s.is_in_slurm_job:
        return Default(s.hardware.scheduler.machines, "the number of machines of this job")
    return Default(2, "an example; enter the number of your machines")


def address(s: Situation) -> Default:
    if s.where == SLURM and s.hardware.scheduler and s.hardware.scheduler.main_address:
        return Default(s.hardware.scheduler.main_address, "the first machine of this job")
    if s.where == SLURM:
        return Default(None, "the launch reads it from the SLURM job")
    if pod(s):
        return Default(None, "it is an address inside the pod")
    return Default(gethostname(), "this machine, which must then be machine 0")


def use_cpu(s: Situation) -> Default:
    if s.where == SEVERAL:
        return Default(not s.gpus, "as on this machine")
    return Default(False, "the usual choice")


def processes_per_machine(s: Situation) -> Default:
    if s.on_tpu:
        return Default(8, "one for each TPU device; a machine has 1, 4 or 8")
    if s.on_cpu:
        return Default(min(2, s.hardware.cores), "enough to test distributed training")
    if s.gpus and s.where != ELSEWHERE:
        return Default(s.gpus, "one per GPU found here")
    return Default(8, "most GPU servers have 8")


def precision(s: Situation) -> Default:
    if s.on_cpu:
        return Default("no", "on a CPU, bf16 and fp16 are usually slower than fp32")
    if (old := gpu_without_bf16(s)) is not None:
        return Default("fp16", f"{old} does not support bf16")
    return Default("bf16", "same range as fp32 at half the memory; no loss scaling needed")


def strategy(s: Situation) -> Default:
    value, reason = numbers.suggest_strategy(s, [strategy for strategy in ShardingStrategy if not why_not(s, strategy)])
    return Default(value.value, reason)


def offload(s: Situation) -> Default:
    return Default(*numbers.suggest_offload(s))


def offload_state(s: Situation) -> Default:
    return Default(*numbers.suggest_offload_of_state(s))


def wrapping(s: Situation) -> Default:
    if s.model is not None and not s.model.suggested_classes:
        return Default("SIZE_BASED_WRAP", "no class is repeated in the model")
    return Default("TRANSFORMER_BASED_WRAP", "one unit per block is the usual choice")


def classes(s: Situation) -> Default:
    if s.model is None:
        return Default([], "the repeated block classes are found in the model when training starts")
    if not s.has_class_names:
        return Default([], "this model source has no class names; they are found when training starts")
    found = s.model.suggested_classes
    return Default(found, "the block classes that the model repeats" if found else "no class is repeated in the model")


def min_params(s: Situation) -> Default:
    quarter = s.model.numel // 4 if s.model else 0
    if s.model and quarter < 100_000_000:
        return Default(max(1, quarter), "a quarter of the model")
    return Default(100_000_000, "FSDP's usual value")
