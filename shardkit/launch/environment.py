"""The variables of every rank: ours, and those that make Accelerate and the Trainer follow the same file."""

import re
from collections.abc import Mapping

from shardkit.config import xla
from shardkit.config.meaning import mesh_sizes, reshards_after_forward
from shardkit.config.schema import Config, FsdpConfig, WrapPolicy
from shardkit.digits import number_in
from shardkit.launch import names

_CP_SIZE = "PARALLELISM_CONFIG_CP_SIZE"


def rank_variables(
    config: Config, device: str, ranks_here: int, cores: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """The variables set for the ranks, in addition to the `inherited` ones."""
    variables = {
        names.NUM_PROCESSES: str(ranks_here * config.num_machines),
        names.STOP_TIMEOUT_S: f"{config.shardkit.launch.stop_timeout_s:g}",
        "OMP_NUM_THREADS": str(threads_of(config, ranks_here, cores, inherited)),
        "PYTHONFAULTHANDLER": "1",
    }
    if config.gpu_ids and config.gpu_ids.strip().lower() != "all":
        variables["CUDA_VISIBLE_DEVICES"] = config.gpu_ids.replace(" ", "")
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if device == "xla":
        variables |= tpu_variables(config) | xla.variables(config, inherited)
    if config.debug:
        variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return variables | accelerate_variables(config, device)


def tpu_variables(config: Config) -> dict[str, str]:
    """The variables in `tpu_env`, each NAME=value."""
    return dict(line.split("=", 1) for line in config.tpu_env)


def threads_of(config: Config, ranks_here: int, cores: int, inherited: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS: as configured, else as in the user's shell, else this machine's cores divided by its ranks."""
    chosen = config.shardkit.launch.threads_per_rank
    if chosen:
        return chosen
    return number_in(inherited.get("OMP_NUM_THREADS", "")) or max(1, cores // max(1, ranks_here))


def accelerate_variables(config: Config, device: str) -> dict[str, str]:
    """What `accelerate launch` would set for the same configuration.

    Accelerate shards on accelerators only: on the CPU the same script runs as DDP there (see `cpu_note`).
    """
    variables = {
        "ACCELERATE_MIXED_PRECISION": config.mixed_precision,
        "ACCELERATE_USE_CPU": _flag(device == "cpu"),
    }
    if config.mixed_precision == "fp8":
        variables["ACCELERATE_FP8_BACKEND"] = "AO"
    if config.shardkit.gradient_accumulation_steps > 1:  # this variable outranks what the script itself says
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(config.shardkit.gradient_accumulation_steps)
    if config.debug:
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if config.enable_cpu_affinity:
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    if config.shardkit.compile:
        variables["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR"
    if config.downcast_bf16:
        variables["ACCELERATE_DOWNCAST_BF16"] = "true"
    if config.mode == "fsdp" and device == "cuda":
        variables |= {"ACCELERATE_USE_FSDP": "true", **fsdp_variables(config.fsdp), **mesh_variables(config)}
    return variables


def fsdp_variables(fsdp: FsdpConfig) -> dict[str, str]:
    """Accelerate's FSDP_* for this section."""
    variables = {
        "FSDP_VERSION": str(fsdp.version),
        "FSDP_SHARDING_STRATEGY": fsdp.sharding_strategy.value,
        "FSDP_RESHARD_AFTER_FORWARD": _reshard(fsdp),
        "FSDP_OFFLOAD_PARAMS": _flag(fsdp.offload_params),
        "FSDP_AUTO_WRAP_POLICY": fsdp.auto_wrap_policy.value,
        "FSDP_BACKWARD_PREFETCH": fsdp.backward_prefetch.value,
        "FSDP_FORWARD_PREFETCH": _flag(fsdp.forward_prefetch),
        "FSDP_STATE_DICT_TYPE": fsdp.state_dict_type.value,
        "FSDP_USE_ORIG_PARAMS": _flag(fsdp.use_orig_params),
        # Weights that only rank 0 has loaded must be copied to the other ranks.
        "FSDP_CPU_RAM_EFFICIENT_LOADING": _flag(fsdp.cpu_ram_efficient_loading and fsdp.sync_module_states),
        "FSDP_SYNC_MODULE_STATES": _flag(fsdp.sync_module_states),
        "FSDP_ACTIVATION_CHECKPOINTING": _flag(fsdp.activation_checkpointing),
    }
    if fsdp.auto_wrap_policy is WrapPolicy.SIZE_BASED_WRAP:
        variables["FSDP_MIN_NUM_PARAMS"] = str(fsdp.min_num_params)
    if fsdp.transformer_layer_cls_to_wrap:
        variables["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(fsdp.transformer_layer_cls_to_wrap)
    if fsdp.ignored_modules:
        variables["FSDP_IGNORED_MODULES"] = fsdp.ignored_modules
    return variables


def mesh_variables(config: Config) -> dict[str, str]:
    """Hybrid strategies, and ranks that share sequences, in Accelerate's terms: a mesh (its FSDP version 2 only)."""
    context = config.shardkit.mesh.context_size
    if not (config.fsdp.sharding_strategy.is_hybrid or context > 1) or config.fsdp.version == 1:
        return {}
    sizes = mesh_sizes(config, config.num_processes, config.processes_per_machine)
    if sizes.shard % context:
        context = 1  # groups over several replicas, which Accelerate does not have
    return {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(sizes.replicate),
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(sizes.shard // context),
        "PARALLELISM_CONFIG_TP_SIZE": "1",
        _CP_SIZE: str(context),
    }


def cpu_note(config: Config, device: str, source: str) -> str | None:
    """A note for scripts on Accelerate or the Trainer that run on the CPU; None if there is none."""
    if not _is_theirs(source) or device != "cpu" or config.mode != "fsdp":
        return None
    return (
        "note: Accelerate and the Transformers Trainer do not shard on the CPU: this script runs as DDP (on GPUs: "
        f"{config.fsdp.sharding_strategy.value}); with --as-accelerate it runs on shardkit, which shards here too."
    )


def context_note(config: Config, device: str, source: str) -> str | None:
    """A note for scripts on Accelerate or the Trainer whose ranks do not share sequences there; None if there is
    none."""
    size = config.shardkit.mesh.context_size
    if not _is_theirs(source) or size == 1:
        return None
    if device == "cuda" and config.mode == "fsdp" and mesh_variables(config).get(_CP_SIZE) == str(size):
        return None
    return (
        f"note: shardkit.mesh.context_size: {size}: Accelerate and the Transformers Trainer share sequences under FSDP "
        "version 2 on GPUs only, by the ranks of a shard group: this script's ranks have whole ones; with "
        "--as-accelerate it runs on shardkit, where they share them."
    )


def _is_theirs(source: str) -> bool:
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    return "shardkit" not in imported and bool(imported & {"accelerate", "transformers"})


def spawn_note(source: str) -> str | None:
    """A note for scripts that start ranks by themselves; None if there is none. Where such a process joins a group
    before it makes an Accelerator, nobody else tells it: it waits for a store that no launcher's rank holds."""
    found = re.search(r"^[^#\n]*\b((?:mp|multiprocessing)\.(?:spawn|start_processes))\(", source, re.MULTILINE)
    if not found:
        return None
    return (
        f"note: the script calls {found[1]}, and launch starts the ranks already: call its function directly here, or "
        "processes wait for each other."
    )


def _reshard(fsdp: FsdpConfig) -> str:
    if fsdp.version == 1:
        return fsdp.sharding_strategy.value
    return _flag(reshards_after_forward(fsdp))


def _flag(value: bool) -> str:
    return str(value).lower()
