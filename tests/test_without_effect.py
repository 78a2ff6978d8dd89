"""A setting acts, or a note says that it does not: by engine, and beside other settings."""

import pytest

from shardkit.config import files, validation
from shardkit.config.schema import Config

ENGINES = {
    "one process": "distributed_type: NO\nnum_processes: 1\n",
    "DDP": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
    "NO_SHARD": "num_processes: 2\nfsdp_sharding_strategy: 3\n",
    "FSDP": "num_processes: 2\n",
    "whole on TPUs": "distributed_type: XLA\nnum_processes: 2\n",
    "sharded on TPUs": "distributed_type: XLA\nnum_processes: 2\nxla: true\n",
}
TPUS = ("whole on TPUs", "sharded on TPUs")
SHARDS, EXCHANGES = ("FSDP", "sharded on TPUs"), ("DDP", "NO_SHARD", "FSDP", *TPUS)

# Each setting, and the engines in which it acts.
ACTS_IN = {
    "fsdp_forward_prefetch: true": ("FSDP",),
    "fsdp_backward_prefetch: NO_PREFETCH": ("FSDP",),
    "fsdp_ignored_modules: head": SHARDS,
    "fsdp_cpu_ram_efficient_loading: false": SHARDS,
    "fsdp_transformer_layer_cls_to_wrap: Block": SHARDS,
    "fsdp_auto_wrap_policy: NO_WRAP": SHARDS,
    "fsdp_sync_module_states: false": EXCHANGES,
    "fsdp_state_dict_type: FULL_STATE_DICT": ("one process", *EXCHANGES),
    "fsdp_activation_checkpointing: true": ("one process", *EXCHANGES),
    "shardkit: {ddp: {static_graph: true}}": ("DDP", "NO_SHARD"),
    "shardkit: {ddp: {comm_hook: fp16}}": ("DDP", "NO_SHARD"),
    "shardkit: {precision: {reduce_dtype: bf16}}": EXCHANGES,
    "shardkit: {ddp_find_unused_parameters: true}": EXCHANGES,
    "shardkit: {precision: {output_dtype: bf16}}": ("one process", *EXCHANGES),
    "shardkit: {offload_activations: true}": ("one process", "DDP", "NO_SHARD", "FSDP"),
    "shardkit: {offload_optimizer: true}": ("one process", "DDP", "NO_SHARD", "FSDP"),
    "shardkit: {compile: true}": ("one process", *EXCHANGES),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", ACTS_IN)
def test_a_setting_acts_or_is_noted(engine, setting):
    if "offload_" in setting and engine in TPUS:
        pytest.skip("refused there")
    notes = files.read_text(ENGINES[engine] + setting + "\n").notes
    notes = [note for note in notes if "keys are at the top level" not in note]
    name = setting.split(": ")[-2].rpartition("{")[2]
    if engine in ACTS_IN[setting]:
        assert notes == []
    else:
        assert len(notes) == 1 and name in notes[0] and "has no effect with" in notes[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shardkit: {recompute: operators}\n", "recompute: has no effect without activation checkpointing; write"),
        ("shardkit: {recompute_every: 2}\n", "recompute_every: has no effect without activation checkpointing"),
        ("shardkit: {precision: {init_scale: 4}}\n", "init_scale: has no effect without fp16, which alone needs"),
        ("mixed_precision: bf16\nshardkit: {precision: {growth_interval: 4}}\n", "growth_interval: has no effect"),
        (
            "num_processes: 2\nfsdp_config: {fsdp_sharding_strategy: 3}\n"
            "shardkit: {ddp: {power_sgd_rank: 2, comm_hook: fp16}}\n",
            "power_sgd_rank: has no effect with comm_hook fp16; write comm_hook: power_sgd.",
        ),
        ("shardkit: {launch: {lost_timeout_s: 4}}\n", "lost_timeout_s: has no effect without min_machines, which"),
        ("use_cpu: true\nenable_cpu_affinity: true\n", "enable_cpu_affinity: has no effect on the CPU"),
        ("use_cpu: true\ngpu_ids: 0,1\n", "gpu_ids: has no effect on the CPU"),
        (
            "use_cpu: true\nshardkit: {offload_activations: true}\n",
            "offload_activations: saves nothing on the CPU, whose",
        ),
        ("use_cpu: true\nshardkit: {offload_optimizer: true}\n", "offload_optimizer: has no effect on the CPU, whose"),
        (
            "num_processes: 2\nfsdp_config: {fsdp_offload_params: true}\nshardkit: {offload_optimizer: true}\n",
            "offload_optimizer: has no effect with fsdp_offload_params, by which",
        ),
        ("use_cpu: true\nfsdp_config: {fsdp_cpu_ram_efficient_loading: no}\n", "loading: has no effect on the CPU; it"),
        ("tpu_use_cluster: true\ncommands: [ls]\n", "only; it has no effect with distributed_type FSDP; so it is with"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 3\nshardkit: {mesh: {shard_size: 2}}\n",
            "shard_size: has no effect with distributed_type MULTI_GPU; only FSDP shards.",
        ),
        (
            "fsdp_config: {fsdp_min_num_params: 5}\n",
            "has an effect with TRANSFORMER_BASED_WRAP only where no class repeats in the model; SIZE_BASED_WRAP",
        ),
        (
            "distributed_type: NO\nnum_processes: 1\n"
            "fsdp_config: {fsdp_offload_params: yes, fsdp_forward_prefetch: yes}\n",
            "only FSDP shards; so it is with fsdp_config.fsdp_forward_prefetch.",
        ),
    ],
)
def test_a_setting_beside_others_is_noted(text, words):
    notes = files.read_text(text).notes
    assert len(notes) == 1 and words in notes[0]


@pytest.mark.parametrize(
    "text",
    [
        "use_cpu: true\ngpu_ids: all\n",
        "mixed_precision: fp16\nshardkit: {precision: {init_scale: 4}}\n",
        "fsdp_config: {fsdp_activation_checkpointing: yes}\nshardkit: {recompute: operators}\n",
        "distributed_type: XLA\nxla_fsdp_grad_ckpt: true\nshardkit: {recompute_every: 2}\n",
        "distributed_type: MULTI_GPU\nshardkit: {compile: yes}\nfsdp_config: {fsdp_transformer_layer_cls_to_wrap: A}\n",
    ],
)
def test_a_setting_that_acts_beside_others_is_not_noted(text):
    assert files.read_text(text).notes == []


DDP = {"distributed_type": "MULTI_CPU", "use_cpu": "true", "num_processes": "2"}


def test_a_default_that_is_asked_for_is_noted():
    """FULL_SHARD beside DDP: who writes the strategy expects shards."""
    asked = files.read_text("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n").notes
    (of_flag,) = files.resolve(settings=DDP | {"fsdp.offload_params": "false"}).notes
    _, of_code = validation.built_in_python(Config(**DDP, fsdp={"sharding_strategy": "FULL_SHARD"}))
    assert all(len(notes) == 1 and "sharding_strategy: has no effect with" in notes[0] for notes in (asked, of_code))
    assert "fsdp.offload_params: has no effect with distributed_type MULTI_CPU" in of_flag
    assert not files.read_text("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_offload_params: false}\n").notes
