"""The options of each question, with their consequences."""

from collections.abc import Callable, Sequence
from typing import Any

from shardkit.config.meaning import runs_on_cpu
from shardkit.config.schema import ShardingStrategy
from shardkit.model.cut import select_units
from shardkit.plan import devices
from shardkit.sizes import in_words
from shardkit.wizard import defaults, numbers
from shardkit.wizard.conditions import gpu_without_bf16, has_eight_bits, why_not
from shardkit.wizard.prompter import Option
from shardkit.wizard.question import show
from shardkit.wizard.situation import CPU, ELSEWHERE, HERE, SEVERAL, SLURM, TPU, Situation
from shardkit.wording import count_text, counted

MOST_SHARING = 64
"""Ranks that share a sequence, where the model's heads are not known: models with more are rare."""
EIGHT_BIT_TEXTS = {
    "fp8": "bf16 with Linear layers and their all-gathers in fp8 (torchao); large layers are faster",
    "mxfp8": "bf16 with Linear layers in fp8, a scale for each 32 numbers (torchao)",
}
STRATEGY_TEXTS = {
    ShardingStrategy.FULL_SHARD: "parameters, gradients and optimizer state sharded; least memory",
    ShardingStrategy.SHARD_GRAD_OP: "as 1, but parameters stay gathered until backward; less traffic",
    ShardingStrategy.NO_SHARD: "every process has the whole state (DDP); most memory",
    ShardingStrategy.HYBRID_SHARD: "FULL_SHARD within each machine, replicated across machines",
    ShardingStrategy.HYBRID_SHARD_ZERO2: "SHARD_GRAD_OP within each machine, replicated across machines",
}


def yes_no(yes: str, no: str) -> Callable[[Situation], Sequence[Option]]:
    """The options of a yes-or-no question, with the consequence of each."""
    return lambda s: (Option(False, "no", no), Option(True, "yes", yes))


def fixed(*options: Option) -> Callable[[Situation], Sequence[Option]]:
    """Options that do not depend on the situation."""
    return lambda s: options


def where(s: Situation) -> Sequence[Option]:
    here = [Option(HERE, "this machine", s.devices_text)]
    if s.gpus:
        here.append(Option(CPU, "CPU of this machine", "slow; for tests"))
    return (
        *here,
        Option(ELSEWHERE, "another machine", "one machine with GPUs; the file is only written here"),
        Option(SEVERAL, "several machines", "run the launch command on each machine"),
        Option(SLURM, "SLURM", "machines and address come from the job"),
        Option(TPU, "TPU", "with PyTorch/XLA"),
    )


def gpus(s: Situation) -> Sequence[Option]:
    """The devices known to `shardkit plan`, and others by their memory."""
    known = {key: device for key, device in devices.DEVICES.items() if key.split("-")[0] not in {"cpu", "tpu"}}
    listed = [
        Option(key, device.name, f"{in_words(device.memory_bytes or 0)} of memory")
        for key, device in sorted(known.items(), key=lambda item: item[1].name)
    ]
    return (
        *listed,
        Option("other", "another GPU", "its memory is asked next"),
        Option("unknown", "not known", "memory is shown without a check whether it fits"),
    )


def precision(s: Situation) -> Sequence[Option]:
    said = s.base.mixed_precision if s.has_base and runs_on_cpu(s.base) == s.on_cpu else ""
    reason = "TPUs compute in bf16" if s.on_tpu and said != "fp16" else ""
    use = "slow on a CPU" if s.on_cpu else "for GPUs without bf16"
    old = gpu_without_bf16(s)
    no_bf16 = f"{old} does not support it" if old and not s.on_cpu and said != "bf16" else ""
    eight_bits = [
        Option(name, name, text) for name, text in EIGHT_BIT_TEXTS.items() if said == name or has_eight_bits(s, name)
    ]
    return (
        Option("bf16", "bf16", "same range as fp32, no loss scaling", disabled=no_bf16),
        Option("fp16", "fp16", f"{use}; the loss is scaled for you", disabled=reason),
        Option("no", "no", "fp32 throughout: most memory, slowest"),
        *eight_bits,
    )


def strategies(s: Situation) -> Sequence[Option]:
    """The five strategies; with a model, memory, fit and traffic instead of the description."""
    estimates, device = numbers.estimates(s), numbers.device_of(s)
    suggested = defaults.strategy(s).value if estimates else None
    options = []
    for strategy, text in STRATEGY_TEXTS.items():
        reason = why_not(s, strategy)
        if reason:
            text = ""
        elif strategy in estimates:
            text = numbers.cells(estimates[strategy], device)
            text += "  (suggested)" if strategy.value == suggested else ""
        options.append(Option(strategy.value, strategy.value, text, reason))
    return options


def details(s: Situation) -> Sequence[Option]:
    """FSDP's details as suggested, or one by one."""
    classes = defaults.classes(s).value
    by_class = f"one unit for each {' and '.join(classes)}" if classes else "one unit for each repeated block"
    by_size = f"units of {show(defaults.min_params(s).value)} parameters"
    wrapping = by_class if defaults.wrapping(s).value == "TRANSFORMER_BASED_WRAP" else by_size
    offload = "no CPU offload"
    if defaults.offload(s).value:
        offload = "CPU offload on"
    elif defaults.offload_state(s).value:
        offload = "optimizer state in host memory"
    return (
        Option("suggested", "as suggested", f"{offload}; {wrapping}; prefetch in backward; sharded state dict"),
        Option("each", "one by one", f"{7 if s.on_cpu else 8} questions, with the cost of each choice"),
    )


def offload(s: Situation) -> Sequence[Option]:
    no, yes = numbers.offload_texts(s)
    return Option(False, "no", no), Option(True, "yes", yes)


def offload_state(s: Situation) -> Sequence[Option]:
    no, yes = numbers.offload_of_state_texts(s)
    return Option(False, "no", no), Option(True, "yes", yes)


def wrapping(s: Situation) -> Sequence[Option]:
    by_class = Option("TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "one unit for each block class")
    by_size = Option("SIZE_BASED_WRAP", "SIZE_BASED_WRAP", "units with at least a given number of parameters")
    whole = Option("NO_WRAP", "NO_WRAP", "the whole model is one unit; most memory")
    return numbers.with_peaks(s, "auto_wrap_policy", (by_class, by_size, whole))


def prefetch(s: Situation) -> Sequence[Option]:
    before = Option("BACKWARD_PRE", "BACKWARD_PRE", "before this unit's gradients; fastest")
    after = Option("BACKWARD_POST", "BACKWARD_POST", "after this unit's gradients; less memory")
    none = Option("NO_PREFETCH", "NO_PREFETCH", "when the unit is needed; least memory, slowest")
    return numbers.with_peaks(s, "backward_prefetch", (before, after, none))


def class_options(s: Situation) -> Sequence[Option]:
    """The classes of the model that can be units; empty where they are unknown."""
    if s.model is None or not s.has_class_names:
        return ()
    return tuple(
        Option(c.name, c.name, f"{c.count} x {count_text(c.numel_each)}, {c.share:.0%} of parameters")
        for c in s.model.block_classes
    )


def context_sizes(s: Situation) -> Sequence[Option]:
    """The divisors of the ranks, as far as a model has so many heads; with a model, a rank's memory for each."""
    facts = s.model.facts if s.model is not None else None
    most = min(s.world_size, facts.heads if facts else MOST_SHARING)
    sizes = [size for size in range(1, s.world_size + 1) if s.world_size % size == 0]
    found = []
    for size in sizes:
        if size > most and not (s.has_base and size == s.base.shardkit.mesh.context_size):
            continue
        reason = f"does not divide the {facts.heads} heads" if facts and facts.heads % size else ""
        text = numbers.shared_text(s, size) or ("whole sequences" if size == 1 else f"1/{size} of each sequence")
        found.append(Option(size, str(size), "" if reason else text, reason))
    return found


def reduce_dtypes(s: Situation) -> Sequence[Option]:
    return (
        Option(None, "default", "fp32"),
        Option("fp32", "fp32", "the default, written explicitly"),
        Option("bf16", "bf16", "half the traffic, less exact"),
        Option("fp16", "fp16", "half the traffic; can overflow"),
    )


# --- notes on a given answer ---


def processes_note(s: Situation, value: Any) -> str:
    """The total, and a warning if there are fewer cores."""
    total = f"{s.machines * int(value):,} in total" if s.machines > 1 else ""
    crowded = s.on_cpu and s.where in {HERE, CPU} and int(value) > s.hardware.cores
    return "; ".join(
        filter(None, [total, f"more than the {counted(s.hardware.cores, 'core')} here: slow" if crowded else ""])
    )


def units_note(s: Situation, value: Any) -> str:
    """The number of units for a minimum size."""
    if s.model is None:
        return ""
    config = s.base.fsdp.changed(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=int(value))
    return f"gives {len(select_units(s.model.tree, config)) + 1} units"
