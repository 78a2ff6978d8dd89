"""Command lines of `accelerate launch` and torchrun in shardkit's words."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardkit.config import hardware
from shardkit.digits import number_in
from shardkit.errors import UsageError


def in_our_words(arguments: Sequence[str], with_value: Collection[str]) -> list[str]:
    """A launch command line with the flags of `accelerate launch` and torchrun translated to shardkit's, up to the
    script. Raises UsageError for those that have no counterpart.

    `--` ends our flags after `-m module`, so that options of the module are not read as shardkit's. `with_value`: the
    flags of shardkit that take a value.
    """
    ours: list[str] = []
    rest = list(arguments)
    machines = ranks_of_each = None
    blocks: dict[str, dict[str, str]] = {}
    while rest and rest[0].startswith("-") and rest[0] != "--":
        flag = _Flag.taken_off(rest)
        if flag.name in REFUSED:
            raise UsageError(f"{flag.name}: {REFUSED[flag.name]}")
        if flag.name == RANKS_OF_EACH:
            ranks_of_each = flag.value()
        elif flag.name == "--num-machines":
            machines = flag.value()
            ours += [flag.name, machines]
        elif flag.name not in with_value and (block := _block_of(flag.name)):
            inner = flag.name[2:].replace("-", "_").removeprefix("fp8_")
            given = "true" if flag.name in SWITCHES_OF_BLOCKS else flag.value()
            blocks.setdefault(block, {})[inner] = given
        else:
            ours += _translated(flag, with_value)
        if flag.name in {"-m", "--module"}:
            rest = ["--", *rest]
            break
    return [*_total(ranks_of_each, machines), *_settings_of(blocks), *ours, *rest]


@dataclass(frozen=True)
class _Flag:
    """A flag by our name for it, the value that is joined to it by `=`, and the words after it."""

    name: str
    joined: str | None
    rest: list[str]

    @classmethod
    def taken_off(cls, rest: list[str]) -> "_Flag":
        """The first of the words, which is taken off them."""
        name, is_joined, value = rest.pop(0).partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        return cls(SAME.get(name, name), value if is_joined else None, rest)

    def value(self) -> str:
        """The joined value, or the next word, which is taken off the rest."""
        return self.joined if self.joined is not None else self.rest.pop(0) if self.rest else ""


def _translated(flag: _Flag, with_value: Collection[str]) -> list[str]:
    """The words of our command line for a flag."""
    name = flag.name
    key = f"fsdp_config.fsdp_{name[7:].replace('-', '_')}" if name.startswith("--fsdp-") else KEYS.get(name)
    if name in OF_OTHER_LAUNCHERS:
        flag.value()
        return []
    if name in SWITCHES:
        return ["--set", SWITCHES[name]] if SWITCHES[name] else []
    if name not in with_value:
        plain = name if flag.joined is None else f"{name}={flag.joined}"
        return [plain] if key is None else ["--set", f"{key}={flag.value()}"]
    if flag.joined is not None and name.startswith("--"):
        return [f"{name}={flag.joined}"]
    if flag.joined is None and not flag.rest:
        return [name]
    return [name, flag.value()]  # of -n=2 click takes =2 for the value


def _settings_of(blocks: dict[str, dict[str, str]]) -> list[str]:
    """Blocks of Accelerate's file as flags. No backend means off, also where a file compiles."""
    settings = [f"{block}={json.dumps(inner)}" for block, inner in blocks.items()]
    if blocks.get("dynamo_config", {}).get("dynamo_backend", "").lower() == "no":
        settings.append("shardkit.compile=false")
    return [word for setting in settings for word in ("--set", setting)]


def _block_of(name: str) -> str | None:
    """The block of Accelerate's file that has the setting of this flag of `accelerate launch`; None for other flags."""
    return next((block for start, block in BLOCKS.items() if name.startswith(start)), None)


def _total(ranks_of_each: str | None, machines: str | None) -> list[str]:
    """torchrun's number of ranks on each machine, on one machine by default, as flags with the total number."""
    if ranks_of_each is None:
        return []
    if ranks_of_each in {"auto", "gpu", "cpu"}:
        here = hardware.detect()
        counts = {"gpu": len(here.devices), "cpu": here.cores, "auto": len(here.devices) or here.cores}
        if not counts[ranks_of_each]:
            raise UsageError(f"{RANKS_OF_EACH}: this machine has no GPU (got gpu); write a number, or auto.")
        ranks_of_each = str(counts[ranks_of_each])
    most = (machines or "1").rpartition(":")[2]
    numbers = number_in(ranks_of_each), number_in(most)
    total = ranks_of_each if numbers[0] is None or numbers[1] is None else str(numbers[0] * numbers[1])
    return ["-n", total, *([] if machines else ["--num-machines", "1"])]


SAME = {
    "--config-file": "--config",
    "--use-cpu": "--cpu",
    "--max-restarts": "--restarts",
    "--log-dir": "--logs",
    "--main-process-address": "--main",
    "--nnodes": "--num-machines",
    "--node-rank": "--machine-rank",
    "--rdzv-endpoint": "--main",
    "--nproc": "--nproc-per-node",
}
"""Other names of our flags, of Accelerate and torchrun."""

RANKS_OF_EACH = "--nproc-per-node"
"""torchrun's flag for what `_total` computes with."""

SWITCHES = {
    "--use-fsdp": "distributed_type=FSDP",
    "--multi-gpu": "distributed_type=MULTI_GPU",
    "--tpu": "distributed_type=XLA",
    "--debug": "debug=true",
    "--same-network": "same_network=true",
    "--downcast-bf16": "downcast_bf16=true",
    "--enable-cpu-affinity": "enable_cpu_affinity=true",
    "--use-deepspeed": "distributed_type=DEEPSPEED",
    "--use-megatron-lm": "distributed_type=MEGATRON_LM",
    "--use-xpu": "distributed_type=MULTI_XPU",
    "--ipex": "ipex_config=true",
    "--use-parallelism-config": "",
    "--quiet": "",
    "-q": "",
    "--standalone": "",
    "--mps": "",
    "--tpu-cluster": "tpu_use_cluster=true",
    "--no-tpu-cluster": "tpu_use_cluster=false",
    "--tpu-use-sudo": "tpu_use_sudo=true",
}
"""Flags without a value of Accelerate and torchrun, as settings; "": what it says is the default, or only changes what
their launcher prints."""

OF_OTHER_LAUNCHERS = {
    *("--rdzv-id", "--rdzv-conf", "--role", "--monitor-interval"),
    *("--tee", "-t", "--redirects", "-r", "--log-line-prefix-template", "--local-ranks-filter", "--logs-specs"),
    *("--duplicate-stdout-filters", "--duplicate-stderr-filters", "--event-log-handler"),
    *("--local-addr", "--start-method", "--signals-to-handle"),
}
"""Flags with a value that only say how torchrun's ranks meet, are watched and print; here each run has its own port,
and every rank's lines are in its log."""

REFUSED = {
    "--no-python": (
        "the ranks run Python; give the Python script that the program starts, -m MODULE, or the path of an installed "
        "command that is a Python script: shardkit launch $(which tune)."
    ),
    "--run-path": "is not needed; give the script itself.",
    "--virtual-local-rank": "each rank has its own LOCAL_RANK here; remove it, and choose devices by LOCAL_RANK.",
    "--numa-binding": "is not supported by this name; write --set enable_cpu_affinity=true.",
}
"""Flags of torchrun and Accelerate that change what runs, with what to do instead."""

BLOCKS = {
    "--dynamo-": "dynamo_config",
    "--fp8-": "fp8_config",
    "--parallelism-config-": "parallelism_config",
    "--deepspeed": "deepspeed_config",
    "--zero": "deepspeed_config",
    "--offload-": "deepspeed_config",
    "--gradient-clipping": "deepspeed_config",
    "--megatron-lm-": "megatron_lm_config",
    "--mpirun-": "mpirun_config",
}
"""How flags of Accelerate begin, and the block of its file that has the same settings. The values of a block are read
together, as those of a file: translated, or refused with what to use instead."""

SWITCHES_OF_BLOCKS = {
    *("--dynamo-use-fullgraph", "--dynamo-use-dynamic", "--dynamo-use-regional-compilation"),
    "--fp8-use-autocast-during-eval",
}
"""Those without a value."""

KEYS = {
    "--main-process-ip": "main_process_ip",
    "--main-process-port": "main_process_port",
    "--master-addr": "main_process_ip",
    "--master-port": "main_process_port",
    "--rdzv-backend": "rdzv_backend",
    "--gpu-ids": "gpu_ids",
    "--num-cpu-threads-per-process": "shardkit.launch.threads_per_rank",
    "--gradient-accumulation-steps": "shardkit.gradient_accumulation_steps",
    "--main-training-function": "main_training_function",
    "--timeout": "shardkit.launch.process_group_timeout_s",
    "--shutdown-timeout": "shardkit.launch.stop_timeout_s",
}
"""Flags with a value of Accelerate and torchrun, and the settings that they are; every --fsdp_KEY is one of
fsdp_config."""
