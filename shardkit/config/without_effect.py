"""Settings that have no effect where they are: notes, one for each reason. Pure functions of a Config.

A rule names settings, and says where these act. Settings that have their default are noted only if asked for.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from shardkit.config.findings import Finding
from shardkit.config.keys import all_keys, value_at
from shardkit.config.meaning import dtypes, runs_on_cpu, shards_on_xla
from shardkit.config.schema import Config, DdpConfig, DistributedType, WrapPolicy


class Rule(NamedTuple):
    """`names`: settings by their names in Python; `acts`: whether they have an effect; `text`: why they have none.
    `because`: the setting that it depends on."""

    names: Sequence[str]
    acts: bool
    text: str
    because: str


def without_effect(config: Config, asked: Collection[str]) -> Iterator[Finding]:
    """A note for each rule with settings that are changed, or asked for, and have no effect."""
    for rule in _rules(config):
        changed = [name for name in rule.names if name in asked or _is_changed(config, name)]
        if changed and not rule.acts:
            yield Finding((changed[0], rule.because), _with_others(rule.text, changed[1:]))


def _rules(config: Config) -> Iterator[Rule]:
    yield from _of_the_engine(config)
    yield from _of_other_settings(config)
    yield from _of_machines(config)


def _of_the_engine(config: Config) -> Iterator[Rule]:
    because = "fsdp.sharding_strategy" if config.distributed_type is DistributedType.FSDP else "distributed_type"
    how, shards = _engine(config), config.mode == "fsdp" or shards_on_xla(config)
    changes_blocks = config.fsdp.activation_checkpointing or config.xla_fsdp_grad_ckpt
    changes_blocks = changes_blocks or config.shardkit.offload_activations or config.shardkit.compile
    yield Rule(_SHARDING, shards, f"has no effect with {how}; only FSDP shards.", because)
    yield Rule(
        ("fsdp.auto_wrap_policy", "fsdp.transformer_layer_cls_to_wrap"),
        shards or changes_blocks,
        f"has no effect with {how}; only FSDP wraps, and nothing is done to blocks.",
        because,
    )
    yield Rule(
        ("fsdp.sharding_strategy", "shardkit.mesh.replicate_size", "shardkit.mesh.shard_size"),
        config.distributed_type in (DistributedType.FSDP, DistributedType.XLA),
        f"has no effect with {how}; only FSDP shards.",
        because,
    )
    yield Rule(
        ("shardkit.unsharded_generate",),
        config.mode == "fsdp",
        f"has no effect with {how}; only FSDP on other devices than TPUs gathers weights for each token.",
        because,
    )
    yield Rule(
        ("fsdp.backward_prefetch", "fsdp.forward_prefetch"),
        not shards_on_xla(config),
        "has no effect with distributed_type XLA; the compiler decides when parameters are gathered.",
        because,
    )
    yield Rule(
        _OF_DDP,
        config.mode not in ("fsdp", "xla"),
        f"has no effect with {how}; DDP runs with NO_SHARD, MULTI_GPU and MULTI_CPU.",
        because,
    )
    yield Rule(
        (
            *("fsdp.sync_module_states", "shardkit.precision.reduce_dtype", "shardkit.ddp_find_unused_parameters"),
            *_OF_DDP,
        ),
        config.distributed_type is not DistributedType.NO,
        "has no effect with distributed_type NO; one process exchanges nothing.",
        "distributed_type",
    )


def _engine(config: Config) -> str:
    if config.distributed_type is not DistributedType.FSDP:
        return f"distributed_type {config.distributed_type.value}"
    return "a sharded strategy" if config.mode == "fsdp" else config.fsdp.sharding_strategy.value


def _of_other_settings(config: Config) -> Iterator[Rule]:
    fsdp, section, policy = config.fsdp, config.shardkit, config.fsdp.auto_wrap_policy
    shards = config.mode == "fsdp" or shards_on_xla(config)
    yield Rule(
        ("fsdp.transformer_layer_cls_to_wrap",),
        policy is WrapPolicy.TRANSFORMER_BASED_WRAP,
        f"has no effect with {policy.value}; TRANSFORMER_BASED_WRAP wraps classes.",
        "fsdp.auto_wrap_policy",
    )
    may_wrap_by_size = policy is WrapPolicy.TRANSFORMER_BASED_WRAP and not fsdp.transformer_layer_cls_to_wrap
    yield Rule(
        ("fsdp.min_num_params",),
        policy is WrapPolicy.SIZE_BASED_WRAP or not shards,
        f"has an effect with {policy.value} only where no class repeats in the model; SIZE_BASED_WRAP wraps by size."
        if may_wrap_by_size
        else f"has no effect with {policy.value}; SIZE_BASED_WRAP wraps by size.",
        "fsdp.auto_wrap_policy",
    )
    yield Rule(
        ("shardkit.offload_optimizer",),
        not (config.mode == "fsdp" and fsdp.offload_params),
        "has no effect with fsdp_offload_params, by which the optimizer's state is in host memory, too.",
        "fsdp.offload_params",
    )
    yield Rule(
        ("shardkit.recompute", "shardkit.recompute_every"),
        fsdp.activation_checkpointing or config.xla_fsdp_grad_ckpt,
        "has no effect without activation checkpointing; write fsdp_activation_checkpointing: true.",
        "fsdp.activation_checkpointing",
    )
    yield Rule(
        [f"shardkit.precision.{name}" for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval")],
        dtypes(config).scales_loss,
        "has no effect without fp16, which alone needs a loss scale.",
        "mixed_precision",
    )
    yield Rule(
        ("shardkit.ddp.power_sgd_rank", "shardkit.ddp.power_sgd_start_step"),
        section.ddp.comm_hook == "power_sgd" or config.mode != "ddp",
        f"has no effect with comm_hook {section.ddp.comm_hook}; write comm_hook: power_sgd.",
        "shardkit.ddp.comm_hook",
    )


def _of_machines(config: Config) -> Iterator[Rule]:
    yield Rule(
        ("shardkit.launch.join_timeout_s", "shardkit.launch.lost_timeout_s"),
        config.shardkit.launch.min_machines is not None,
        "has no effect without min_machines, which makes a run elastic.",
        "shardkit.launch.min_machines",
    )
    is_chosen = config.gpu_ids is not None and config.gpu_ids.strip().lower() != "all"
    yield Rule(
        ("fsdp.cpu_ram_efficient_loading",),
        config.mode != "fsdp" or not runs_on_cpu(config),
        "has no effect on the CPU; it is for Transformers' from_pretrained on GPUs.",
        "use_cpu",
    )
    yield Rule(
        ("enable_cpu_affinity", *(("gpu_ids",) if is_chosen else ())),
        not runs_on_cpu(config),
        "has no effect on the CPU; it is for ranks on GPUs.",
        "use_cpu",
    )
    yield Rule(
        ("shardkit.offload_activations",),
        not runs_on_cpu(config),
        "saves nothing on the CPU, whose memory is the host's; steps are slower.",
        "use_cpu",
    )
    yield Rule(
        ("shardkit.offload_optimizer",),
        not runs_on_cpu(config),
        "has no effect on the CPU, whose memory is the host's.",
        "use_cpu",
    )
    yield Rule(
        ("debug",),
        config.mode != "xla",
        "has no effect on XLA devices, whose collectives and values are inside one program.",
        "distributed_type",
    )
    yield Rule(
        _OF_TPUS,
        config.mode == "xla",
        f"is for TPUs only; it has no effect with distributed_type {config.distributed_type.value}.",
        "distributed_type",
    )


_SHARDING = [
    f"fsdp.{name}"
    for name in (
        *("offload_params", "min_num_params", "backward_prefetch", "forward_prefetch"),
        *("cpu_ram_efficient_loading", "use_orig_params", "limit_all_gathers", "ignored_modules"),
    )
]
_OF_DDP = [f"shardkit.ddp.{name}" for name in DdpConfig.model_fields]
_OF_TPUS = (
    *("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "tpu_name", "tpu_zone", "tpu_use_cluster"),
    *("tpu_use_sudo", "tpu_env", "tpu_vm", "commands", "command_file", "downcast_bf16"),
)


def _is_changed(config: Config, name: str) -> bool:
    path = tuple(name.split("."))
    return value_at(config, path) != all_keys()[path].default


def _with_others(text: str, others: Sequence[str]) -> str:
    """The text of a rule, with the rule's other settings that are changed."""
    if not others:
        return text
    names = ", ".join(all_keys()[tuple(name.split("."))].yaml_name for name in others)
    return f"{text.removesuffix('.')}; so it is with {names}."
