"""Every setting that changes what a rank holds or sends is in the plan; a new one has to be put in one of the lists."""

import re
from pathlib import Path

from shardkit.config.schema import FsdpConfig, MeshConfig, PrecisionConfig, ShardkitConfig

ROOT = Path(__file__).parent.parent / "shardkit"
# What the closed form and the simulation read, directly or by way of the cut and of what settings mean.
READ_BY_THE_PLAN = [*(ROOT / "plan").glob("*.py"), ROOT / "model" / "cut.py", ROOT / "config" / "meaning.py"]

PLANNED = {
    *("sharding_strategy", "reshard_after_forward", "offload_params", "auto_wrap_policy", "min_num_params"),
    *("transformer_layer_cls_to_wrap", "backward_prefetch", "activation_checkpointing", "ignored_modules"),
    *("param_dtype", "reduce_dtype", "output_dtype", "replicate_size", "shard_size"),
    *("compile", "gradient_accumulation_steps", "recompute", "recompute_every"),
    "offload_activations",
}
# Read by the simulation only, because the same `parallelize` does.
SIMULATED = {"forward_prefetch", "ddp_find_unused_parameters"}
WITHOUT_EFFECT = {
    *("version", "state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params"),
    *("limit_all_gathers", "init_scale", "seed", "checkpoint", "launch", "precision", "mesh"),
    *("growth_factor", "growth_interval", "backoff_factor", "data", "end_window_with_data", "log_speed", "profile"),
    "ddp",  # a hook that sends 16 bits lowers traffic; the plan counts what is sent without one
}


def settings() -> set[str]:
    return {
        name for section in (FsdpConfig, PrecisionConfig, MeshConfig, ShardkitConfig) for name in section.model_fields
    }


def test_every_setting_is_planned_or_has_no_effect():
    assert settings() == PLANNED | SIMULATED | WITHOUT_EFFECT
    assert not (PLANNED & SIMULATED or PLANNED & WITHOUT_EFFECT or SIMULATED & WITHOUT_EFFECT)


def test_the_plan_reads_what_is_said_to_be_planned():
    text = "\n".join(path.read_text() for path in READ_BY_THE_PLAN)
    assert {name for name in PLANNED if not re.search(rf"\.{name}\b", text)} == set()


def test_training_reads_what_is_said_to_be_planned():
    places = ("sharding", "runtime", "distributed", "model", "config")
    text = "\n".join(path.read_text() for place in places for path in (ROOT / place).glob("*.py"))
    assert {name for name in PLANNED | SIMULATED if not re.search(rf"\.{name}\b", text)} == set()
