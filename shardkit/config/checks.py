"""Checks across settings: contradictions, and settings that have another effect than expected.

A check reads one whole Config and nothing else: no file, no hardware. It yields findings. A finding is reported at its
first key, and omitted while one of its keys has an invalid value.
"""

import re
import warnings
from collections.abc import Collection, Iterator
from math import gcd

from shardkit.config.document import shortened
from shardkit.config.findings import Finding
from shardkit.config.host_port import problem_of_host
from shardkit.config.meaning import counts_devices, dtypes, eight_bits, given_sizes, runs_on_cpu
from shardkit.config.schema import BackwardPrefetch, Config, DistributedType, ShardingStrategy
from shardkit.config.without_effect import without_effect
from shardkit.errors import ConfigError
from shardkit.sizes import read_size

# As `digits.number_in` reads each of them.
_NUMBERS = re.compile(r"[0-9]{1,18}( *, *[0-9]{1,18})*")


def problems(config: Config) -> list[Finding]:
    """Problems: the configuration cannot run."""
    rules = (
        _processes,
        _addresses,
        _elastic,
        _type_and_processes,
        _mesh,
        _context,
        _offload,
        _activations,
        _eight_bits,
        _gpus,
        _names,
        _texts,
        _ddp,
        _profile,
        _variables,
    )
    return [finding for rule in rules for finding in rule(config)]


def notes(config: Config, asked: Collection[str] = ()) -> list[Finding]:
    """Notes: it runs, but perhaps not as expected. `asked`: names of settings that are wanted, also if the value is the
    default."""
    rules = (_what_fsdp2_does, _precision, _machines)
    return [*without_effect(config, asked), *(finding for rule in rules for finding in rule(config))]


def _processes(config: Config) -> Iterator[Finding]:
    total, machines = config.num_processes, config.num_machines
    keys = ("num_processes", "num_machines")
    if total < machines:
        yield Finding(keys, f"is fewer than one per machine (got {total} on {machines} machines); write the total.")
    elif total % machines:
        near = total - total % machines
        what = f"is not divisible by the number of machines (got {total} on {machines})"
        yield Finding(keys, f"{what}; write the total, such as {near} or {near + machines}.")
    if config.machine_rank >= machines:
        known = f"one of the machines 0 to {machines - 1}" if machines > 1 else "0, of a run on one machine"
        what = f"is not {known} (got {config.machine_rank})"
        do = "write one of them, or more machines" if machines > 1 else "leave it out, or give num_machines"
        yield Finding(("machine_rank", "num_machines"), f"{what}; {do}.")


def _addresses(config: Config) -> Iterator[Finding]:
    addresses = {
        "main_process_ip": config.main_process_ip,
        "shardkit.launch.bind_address": config.shardkit.launch.bind_address,
    }
    for key, host in addresses.items():
        if host is not None and (problem := problem_of_host(host)):
            yield Finding((key,), problem)


def _elastic(config: Config) -> Iterator[Finding]:
    least, most = config.shardkit.launch.min_machines, config.num_machines
    if least is None:
        return
    if most == 1:
        what = f"is for several machines (got num_machines {most})"
        yield Finding(("shardkit.launch.min_machines", "num_machines"), f"{what}; num_machines is the maximum.")
    elif least > most:
        what = f"is more than num_machines (got {least} of {most})"
        yield Finding(("shardkit.launch.min_machines", "num_machines"), f"{what}; num_machines is the maximum.")
    if config.mode == "xla":
        keys = ("shardkit.launch.min_machines", "distributed_type")
        yield Finding(keys, "is not there for TPUs (got distributed_type XLA); leave it out.")


def _type_and_processes(config: Config) -> Iterator[Finding]:
    if config.distributed_type is DistributedType.NO and config.num_processes > 1:
        what = f"NO is one process (got num_processes {config.num_processes})"
        keys = ("distributed_type", "num_processes")
        yield Finding(keys, f"{what}; write FSDP, MULTI_GPU or MULTI_CPU, or num_processes: 1.")


def _mesh(config: Config) -> Iterator[Finding]:
    replicate, shard = config.shardkit.mesh.replicate_size, config.shardkit.mesh.shard_size
    strategy, total = config.fsdp.sharding_strategy, config.num_processes
    first = "shardkit.mesh.replicate_size" if replicate else "shardkit.mesh.shard_size"
    keys = (first, "fsdp.sharding_strategy", "num_processes")
    if not (replicate or shard) or config.distributed_type not in (DistributedType.FSDP, DistributedType.XLA):
        return
    if config.distributed_type is DistributedType.FSDP and not strategy.is_hybrid:
        what = f"mesh sizes are for the hybrid strategies (got {strategy.value})"
        yield Finding(keys, f"{what}; write HYBRID_SHARD or HYBRID_SHARD_ZERO2, or leave the mesh out.")
        return
    try:
        given_sizes(config.shardkit.mesh, total, config.processes_per_machine)
    except ConfigError as error:
        yield Finding(keys, str(error).removeprefix("shardkit.mesh: "))


def _context(config: Config) -> Iterator[Finding]:
    key, size, total = "shardkit.mesh.context_size", config.shardkit.mesh.context_size, config.num_processes
    if size == 1:
        return
    if config.mode == "xla":
        yield Finding((key, "distributed_type"), f"is not there for TPUs (got {size}); write 1, or leave it out.")
    elif total % size and not counts_devices(config):
        what = f"does not divide the number of ranks (got {size} of {total})"
        remedy = f"choose a divisor, for one launch with --set {key}={gcd(size, total)}"
        yield Finding((key, "num_processes"), f"{what}; {remedy}.")


def _offload(config: Config) -> Iterator[Finding]:
    if config.fsdp.offload_params and config.fsdp.sharding_strategy is ShardingStrategy.NO_SHARD:
        keys = ("fsdp.offload_params", "fsdp.sharding_strategy")
        yield Finding(keys, "needs a sharding strategy (got NO_SHARD); write FULL_SHARD, or turn offload off.")


def _variables(config: Config) -> Iterator[Finding]:
    wrong = [line for line in config.tpu_env if not line.partition("=")[0].strip() or "=" not in line]
    if config.mode == "xla" and wrong:
        yield Finding(("tpu_env",), f"is not NAME=value (got {shortened(wrong[0])!r}); correct it, or remove it.")


def _eight_bits(config: Config) -> Iterator[Finding]:
    if runs_on_cpu(config) and (kind := eight_bits(config)):
        yield Finding(("mixed_precision", "use_cpu"), f"{kind} needs a GPU (got a run on the CPU); write bf16.")


def _activations(config: Config) -> Iterator[Finding]:
    section = config.shardkit
    if not section.offload_activations:
        return
    if section.compile:
        keys = ("shardkit.offload_activations", "shardkit.compile")
        yield Finding(keys, "is for blocks that are not compiled (got compile: true); write one of the two.")
    if config.fsdp.activation_checkpointing and section.recompute == "operators":
        keys = ("shardkit.offload_activations", "shardkit.recompute")
        what = "does not reach what recompute: operators keeps (got both)"
        yield Finding(keys, f"{what}; write recompute: blocks, or no offload.")
    if config.mode == "xla":
        keys = ("shardkit.offload_activations", "distributed_type")
        yield Finding(keys, "is not there for TPUs (got distributed_type XLA); leave it out.")


def _gpus(config: Config) -> Iterator[Finding]:
    chosen = config.gpu_ids
    if chosen is None or chosen.lower() == "all":
        return
    if not _NUMBERS.fullmatch(chosen):
        yield Finding(("gpu_ids",), f"is not numbers with commas (got {chosen!r}); write all, or 0,1.")
        return
    count, needed = len(chosen.split(",")), config.processes_per_machine
    if len({number.strip() for number in chosen.split(",")}) < count:
        yield Finding(("gpu_ids",), f"names a GPU twice (got {chosen}); name each once.")
    if count < needed and not runs_on_cpu(config) and config.mode in ("ddp", "fsdp"):
        what = f"is fewer GPUs than processes on a machine (got {count} for {needed})"
        yield Finding(("gpu_ids", "num_processes", "num_machines"), f"{what}; name more, or lower num_processes.")


def _names(config: Config) -> Iterator[Finding]:
    for name in config.fsdp.transformer_layer_cls_to_wrap:
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            what = f"is not the name of a class (got {name!r})"
            yield Finding(("fsdp.transformer_layer_cls_to_wrap",), f"{what}; write names with commas: A,B.")


def _texts(config: Config) -> Iterator[Finding]:
    size = config.shardkit.checkpoint.max_shard_size
    if not read_size(size):
        what = f"is not a size (got {size!r})"
        yield Finding(("shardkit.checkpoint.max_shard_size",), f"{what}; write it with its unit, such as 5GB or 500MB.")
    shown = config.shardkit.launch.show
    if shown.strip().lower() != "all" and not _NUMBERS.fullmatch(shown):
        what = f"is not all, nor ranks with commas (got {shown!r})"
        yield Finding(("shardkit.launch.show",), f"{what}; write all, or 0,1.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the pattern are not checked here
            re.compile(config.fsdp.ignored_modules or "")
    except (re.error, OverflowError, RecursionError) as error:
        what = f"is not a regular expression (got {shortened(config.fsdp.ignored_modules)!r}: {error})"
        yield Finding(("fsdp.ignored_modules",), f"{what}; correct the pattern.")


def _ddp(config: Config) -> Iterator[Finding]:
    hook, wanted = config.shardkit.ddp.comm_hook, config.shardkit.precision.reduce_dtype
    if hook != "no" and wanted is not None:
        keys = ("shardkit.ddp.comm_hook", "shardkit.precision.reduce_dtype")
        yield Finding(keys, f"sends gradients as {hook}, but reduce_dtype says {wanted} (got both); keep one of them.")
    if config.shardkit.ddp.comm_wrapper != "no" and hook != "power_sgd":
        keys = ("shardkit.ddp.comm_wrapper", "shardkit.ddp.comm_hook")
        yield Finding(
            keys, f"is the dtype of power_sgd (got comm_hook {hook}); write it as comm_hook, or leave it out."
        )


def _profile(config: Config) -> Iterator[Finding]:
    section = config.shardkit.profile
    unknown = [name for name in section.activities if name.lower() not in ("cpu", "cuda")]
    if unknown:
        yield Finding(("shardkit.profile.activities",), f"is not cpu or cuda (got {unknown[0]!r}); write cpu,cuda.")
    cycle = [name for name in ("wait", "warmup", "repeat", "skip_first") if getattr(section, name)]
    if cycle and not section.active:
        keys = (f"shardkit.profile.{cycle[0]}", "shardkit.profile.active")
        yield Finding(keys, "is part of a schedule, which records no step (got active 0); write active: 1 or more.")


def _what_fsdp2_does(config: Config) -> Iterator[Finding]:
    """Settings of FSDP version 1 that FSDP2 does not have."""
    if config.mode != "fsdp":
        return
    fsdp, pre = config.fsdp, BackwardPrefetch.BACKWARD_PRE
    if not fsdp.use_orig_params:
        yield Finding(("fsdp.use_orig_params",), "FSDP2 always keeps the original parameters; false changes nothing.")
    if not fsdp.limit_all_gathers:
        yield Finding(
            ("fsdp.limit_all_gathers",), "FSDP2 always limits how many all-gathers run at once; false changes nothing."
        )
    if fsdp.version == 1 and fsdp.backward_prefetch is not pre:
        text = f"{fsdp.backward_prefetch.value} uses FSDP2's prefetching, not version 1's."
        yield Finding(("fsdp.backward_prefetch", "fsdp.version"), text)
    mesh = config.shardkit.mesh
    if fsdp.sharding_strategy.is_hybrid and config.num_machines == 1 and not (mesh.replicate_size or mesh.shard_size):
        text = "on one machine a hybrid strategy has one replica, as the plain one; set shardkit.mesh for more."
        yield Finding(("fsdp.sharding_strategy", "num_machines"), text)


def _precision(config: Config) -> Iterator[Finding]:
    if dtypes(config).scales_loss and runs_on_cpu(config):
        key = "shardkit.precision.param_dtype" if config.shardkit.precision.param_dtype else "mixed_precision"
        yield Finding((key, "use_cpu"), "fp16 is slow on a CPU; bf16 needs no loss scaling.")
    if config.mode == "xla" and config.mixed_precision == "fp16":
        yield Finding(("mixed_precision",), "TPUs compute in bf16, not in fp16; write bf16.")


def _machines(config: Config) -> Iterator[Finding]:
    if config.num_machines > 1 and not config.main_process_ip:
        text = "several machines need the address of machine 0; set it here or at launch, unless a scheduler does."
        yield Finding(("main_process_ip", "num_machines"), text)
    if config.num_machines > 1 and config.rdzv_backend in {"etcd", "etcd-v2"}:
        text = "no etcd server is used: the rendezvous is at machine 0 (main_process_ip and main_process_port)."
        yield Finding(("rdzv_backend", "num_machines"), text)
    if config.num_machines > 1 and not config.same_network:
        text = "has no effect: the machines must reach each other directly, on all ports."
        yield Finding(("same_network", "num_machines"), text)
    if config.distributed_type is DistributedType.MULTI_GPU and config.use_cpu:
        yield Finding(("use_cpu", "distributed_type"), "the ranks train on the CPU, although the type is MULTI_GPU.")
