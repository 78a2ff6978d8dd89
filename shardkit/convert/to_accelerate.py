"""A Config as a file for Accelerate 1.x, without shardkit's own keys; settings that it cannot express are listed."""

from typing import Any

import yaml

from shardkit.config.keys import all_keys, value_at
from shardkit.config.meaning import counts_devices, runs_on_cpu
from shardkit.config.schema import Config, DistributedType, ShardingStrategy
from shardkit.config.yaml_text import value_text
from shardkit.convert.accelerate import IGNORED_IN_VERSION_2

_SAME = ["compute_environment", "num_machines", "num_processes", "machine_rank", "main_process_ip"]
_SAME += ["main_process_port", "rdzv_backend", "same_network", "use_cpu", "gpu_ids", "debug", "main_training_function"]
_SAME += ["enable_cpu_affinity", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm"]
_SAME += ["commands", "command_file"]
_SAME_IN_FSDP = ["offload_params", "auto_wrap_policy", "state_dict_type", "activation_checkpointing"]
_ALWAYS = {"compute_environment", "num_machines", "num_processes", "machine_rank", "rdzv_backend"}
_ALWAYS |= {"same_network", "use_cpu", "main_training_function"}
_TOLD_OTHERWISE = {
    ("distributed_type",),
    ("mixed_precision",),
    ("downcast_bf16",),
    ("fsdp", "version"),
    ("fsdp", "sharding_strategy"),
    ("fsdp", "reshard_after_forward"),
    ("fsdp", "min_num_params"),
    ("fsdp", "cpu_ram_efficient_loading"),
    ("fsdp", "transformer_layer_cls_to_wrap"),
    ("fsdp", "ignored_modules"),
    ("shardkit", "compile"),
    ("shardkit", "offload_activations"),
    ("shardkit", "mesh", "replicate_size"),
    ("shardkit", "mesh", "shard_size"),
}


def to_accelerate(config: Config) -> tuple[str, list[str]]:
    """The YAML for Accelerate, and a line for every setting that is lost."""
    data: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": _type(config)}
    data |= {name: _value(config, (name,)) for name in _SAME if _is_given(config, name)}
    if counts_devices(config):
        del data["num_processes"]  # Accelerate then asks for it; the default, 1, would leave the other devices idle
    data |= _precision(config)
    data["downcast_bf16"] = "yes" if config.downcast_bf16 else "no"
    if config.mode == "fsdp":
        data["fsdp_config"] = _fsdp(config)
        data |= _mesh(config)
    if config.shardkit.compile:
        data["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return yaml.safe_dump(data, sort_keys=False), _lost(config)


def _type(config: Config) -> str:
    if config.mode == "ddp":
        return "MULTI_CPU" if runs_on_cpu(config) else "MULTI_GPU"
    return config.distributed_type.value


def _is_given(config: Config, name: str) -> bool:
    return name in _ALWAYS or value_at(config, (name,)) != all_keys()[(name,)].default


def _value(config: Config, path: tuple[str, ...]) -> Any:
    value = value_at(config, path)
    return getattr(value, "value", value)


def _precision(config: Config) -> dict[str, Any]:
    """Accelerate has no mxfp8, whose other layers are in bf16; of its ways to compute in fp8, torchao's is ours."""
    if config.mixed_precision == "fp8":
        recipe = {"backend": "AO", "enable_fsdp_float8_all_gather": True}
        return {"mixed_precision": "fp8", "fp8_config": recipe}
    return {"mixed_precision": "bf16" if config.mixed_precision == "mxfp8" else config.mixed_precision}


def _fsdp(config: Config) -> dict[str, Any]:
    """The keys of FSDP version 2, the engine that shardkit also uses."""
    data: dict[str, Any] = {"fsdp_version": 2}
    data["fsdp_reshard_after_forward"] = config.fsdp.sharding_strategy.reshards_after_forward
    data |= {f"fsdp_{name}": _value(config, ("fsdp", name)) for name in _SAME_IN_FSDP}
    data["fsdp_cpu_ram_efficient_loading"] = config.fsdp.cpu_ram_efficient_loading and not _loads_everywhere(config)
    if config.fsdp.transformer_layer_cls_to_wrap:
        data["fsdp_transformer_layer_cls_to_wrap"] = ",".join(config.fsdp.transformer_layer_cls_to_wrap)
    if config.fsdp.auto_wrap_policy.value == "SIZE_BASED_WRAP":
        data["fsdp_min_num_params"] = config.fsdp.min_num_params
    if config.shardkit.offload_activations:
        data["fsdp_activation_checkpointing_offload"] = True
    if config.fsdp.ignored_modules:
        data["fsdp_ignored_modules"] = config.fsdp.ignored_modules
    return data


def _loads_everywhere(config: Config) -> bool:
    """Whether Accelerate refuses to load on one rank alone (accelerate 1.15, Accelerator.__init__)."""
    return config.mode == "fsdp" and config.mixed_precision == "fp8"


def _mesh(config: Config) -> dict[str, Any]:
    """Version 2 expresses hybrid strategies, and ranks that share sequences, by mesh sizes."""
    context = _context(config)
    if not (config.fsdp.sharding_strategy.is_hybrid or context > 1) or counts_devices(config):
        return {}
    replicate = _replicas(config)
    sizes = {"dp_replicate_size": replicate, "dp_shard_size": config.num_processes // replicate // context}
    sizes |= {"tp_size": 1, "cp_size": context}
    return {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}


def _replicas(config: Config) -> int:
    mesh = config.shardkit.mesh
    if not config.fsdp.sharding_strategy.is_hybrid:
        return 1
    return mesh.replicate_size or (config.num_processes // mesh.shard_size if mesh.shard_size else config.num_machines)


def _context(config: Config) -> int:
    """How many ranks share each sequence in Accelerate, which divides the ranks of a shard group into them."""
    size = config.shardkit.mesh.context_size
    if size == 1 or config.mode != "fsdp" or counts_devices(config):
        return 1
    return 1 if config.num_processes // _replicas(config) % size else size


def _lost(config: Config) -> list[str]:
    given = {(name,) for name in _SAME} | {("fsdp", name) for name in _SAME_IN_FSDP} | _TOLD_OTHERWISE
    if counts_devices(config) or _context(config) > 1:
        given |= {("shardkit", "mesh", "context_size")}
    if config.mode != "fsdp":
        given |= {path for path in all_keys() if path[0] == "fsdp"}
    lost = [
        f"{key.yaml_name}: {value_text(path, value_at(config, path))}: {_why_lost(key.yaml_path[-1])}."
        for path, key in all_keys().items()
        if path not in given and value_at(config, path) != key.default
    ]
    return [*lost, *_behaves_differently(config)]


def _why_lost(name: str) -> str:
    if name == "context_size":
        return "Accelerate has it under FSDP only, where the ranks of a shard group share sequences"
    is_of_version_1 = name in IGNORED_IN_VERSION_2
    return "Accelerate does not use it with fsdp_version 2" if is_of_version_1 else "Accelerate has no such setting"


def _behaves_differently(config: Config) -> list[str]:
    on_cpu = runs_on_cpu(config)
    lines = []
    if counts_devices(config):
        has_mesh = config.fsdp.sharding_strategy.is_hybrid or config.shardkit.mesh.context_size > 1
        mesh = ", and the sizes of the mesh" if has_mesh else ""
        lines.append(
            f"num_processes: the file does not say it, and Accelerate needs it{mesh}; set it and convert again."
        )
    elif (size := _context(config)) > 1:
        lines.append(
            f"shardkit.mesh.context_size: {size}: Accelerate's ranks pass keys and values around instead (ring "
            "attention): attention must be causal, and masks are left out."
        )
    if config.mixed_precision == "mxfp8":
        lines.append("mixed_precision: mxfp8: Accelerate has no such precision; bf16 is written.")
    if config.fsdp.cpu_ram_efficient_loading and _loads_everywhere(config):
        name = "fsdp_config.fsdp_cpu_ram_efficient_loading"
        lines.append(f"{name}: true: Accelerate refuses it in fp8; false is written.")
    if on_cpu and config.mode == "fsdp":
        lines.append("use_cpu: true: Accelerate has no FSDP on the CPU.")
    if on_cpu and config.mode == "ddp" and config.num_processes > 1:
        lines.append("num_processes: on the CPU Accelerate starts one process, unless mpirun is configured.")
    if config.fsdp.sharding_strategy is ShardingStrategy.NO_SHARD and config.distributed_type is DistributedType.FSDP:
        lines.append(
            f"fsdp_config.fsdp_sharding_strategy: NO_SHARD is written as distributed_type {_type(config)} (DDP)."
        )
    return lines
