"""Training and the plan know the same settings. Which of them reads a setting is derived from the code. A setting that
only one of them reads fails, unless it is in a list below with its reason."""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from shardkit.cli.main import run
from shardkit.cli.plan import plan
from shardkit.config.files import resolve
from shardkit.config.schema import Config
from shardkit.runtime.accelerator import Accelerator

ROOT = Path(__file__).parent.parent / "shardkit"
# Modules that derive values from settings: who names one of their functions reads what that function reads.
DERIVED = ("config/schema.py", "config/meaning.py", "config/xla.py", "model/cut.py")
TRAINING = ("sharding", "runtime", "distributed", "optim", "data", "checkpoint")
PLAN = ("plan", "cli/plan.py")
MODEL = "gpt:layers=6,hidden=128,heads=4,vocab=50,seq=32"

# Read in training only, with the reason.
NOT_IN_THE_PLAN = {
    "debug": "checks collectives, which hold nothing",
    "enable_cpu_affinity": "where threads run",
    "fsdp.version": "for notes",
    "fsdp.state_dict_type": "how checkpoints are written",
    "fsdp.forward_prefetch": "simulated by training's own code; the closed form counts one unit ahead",
    "fsdp.sync_module_states": "before the first step",
    "shardkit.seed": "no effect on sizes",
    "shardkit.unsharded_generate": "generation, which is not in the plan",
    "shardkit.log_speed": "no effect on sizes",
    "shardkit.end_window_with_data": "no effect on a full window",
    "shardkit.ddp_find_unused_parameters": "changes the order of reductions, not their bytes",
    "shardkit.precision.init_scale": "a number",
    "shardkit.precision.growth_factor": "a number",
    "shardkit.precision.backoff_factor": "a number",
    "shardkit.precision.growth_interval": "a number",
    "shardkit.ddp.bucket_cap_mb": "the buckets' sum is that of the gradients",
    "shardkit.ddp.static_graph": "no effect on sizes",
    "shardkit.ddp.comm_wrapper": "power_sgd's own traffic is not estimated, which a note says",
    "shardkit.ddp.power_sgd_rank": "as comm_wrapper",
    "shardkit.ddp.power_sgd_start_step": "as comm_wrapper",
    "shardkit.checkpoint.digest": "no effect on what is written",
    "shardkit.checkpoint.verify": "loads, which are not in the plan",
    "shardkit.checkpoint.resume": "loads, which are not in the plan",
    "shardkit.checkpoint.keep_last": "how many checkpoints there are, not what each takes",
    "shardkit.checkpoint.keep_every": "as keep_last",
    "shardkit.checkpoint.timeout_s": "how long ranks wait",
    "shardkit.checkpoint.max_shard_size": "how exports are written",
}
# Sections of which the plan needs nothing.
NOT_PLANNED_SECTIONS = {
    "launch": "processes and timeouts",
    "data": "batches in host memory",
    "profile": "records of a run",
}
# A value that changes what the plan says, with others that have to be there for it.
EFFECTS: dict[str, dict[str, str]] = {
    "distributed_type": {"distributed_type": "MULTI_GPU"},
    "mixed_precision": {"mixed_precision": "no"},
    "num_machines": {"num_machines": "2", "main_process_ip": "a"},
    "num_processes": {"num_processes": "4"},
    "downcast_bf16": {"distributed_type": "XLA", "downcast_bf16": "true"},
    "xla": {"distributed_type": "XLA", "xla": "true"},
    "xla_fsdp_settings": {
        "distributed_type": "XLA",
        "mixed_precision": "no",
        "xla_fsdp_settings": "{compute_dtype: bfloat16}",
    },
    "xla_fsdp_grad_ckpt": {"distributed_type": "XLA", "xla_fsdp_grad_ckpt": "true"},
    "use_cpu": {"use_cpu": "true", "fsdp_config.fsdp_offload_params": "true"},
    "fsdp.sharding_strategy": {"fsdp_config.fsdp_sharding_strategy": "2"},
    "fsdp.reshard_after_forward": {"fsdp_config.fsdp_reshard_after_forward": "false"},
    "fsdp.offload_params": {"fsdp_config.fsdp_offload_params": "true"},
    "fsdp.auto_wrap_policy": {"fsdp_config.fsdp_auto_wrap_policy": "NO_WRAP"},
    "fsdp.transformer_layer_cls_to_wrap": {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": "Attention"},
    "fsdp.min_num_params": {
        "fsdp_config.fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_config.fsdp_min_num_params": "1000",
    },
    "fsdp.backward_prefetch": {"fsdp_config.fsdp_backward_prefetch": "BACKWARD_POST"},
    "fsdp.activation_checkpointing": {"fsdp_config.fsdp_activation_checkpointing": "true"},
    "fsdp.ignored_modules": {"fsdp_config.fsdp_ignored_modules": "head"},
    "shardkit.precision.param_dtype": {"shardkit.precision.param_dtype": "fp16"},
    "shardkit.precision.reduce_dtype": {"shardkit.precision.reduce_dtype": "bf16"},
    "shardkit.mesh.replicate_size": {
        "fsdp_config.fsdp_sharding_strategy": "4",
        "shardkit.mesh.replicate_size": "4",
    },
    "shardkit.mesh.shard_size": {"fsdp_config.fsdp_sharding_strategy": "4", "shardkit.mesh.shard_size": "4"},
    "shardkit.mesh.context_size": {"shardkit.mesh.context_size": "2"},
    "shardkit.ddp.comm_hook": {"fsdp_config.fsdp_sharding_strategy": "3", "shardkit.ddp.comm_hook": "power_sgd"},
    "shardkit.ddp.broadcast_buffers": {},
    "shardkit.recompute": {"fsdp_config.fsdp_activation_checkpointing": "true", "shardkit.recompute": "operators"},
    "shardkit.recompute_every": {
        "fsdp_config.fsdp_activation_checkpointing": "true",
        "shardkit.recompute_every": "2",
    },
    "shardkit.offload_activations": {"shardkit.offload_activations": "true"},
    "shardkit.offload_optimizer": {"shardkit.offload_optimizer": "true"},
    "shardkit.compile": {"shardkit.compile": "true"},
    "shardkit.checkpoint.blocking": {"shardkit.checkpoint.blocking": "false"},
    "shardkit.gradient_accumulation_steps": {"shardkit.gradient_accumulation_steps": "4"},
}
# Planned, without an effect that MODEL shows: it has no buffers; in fp32 its outputs are not cast.
WITHOUT_AN_EXAMPLE = {"shardkit.ddp.broadcast_buffers", "shardkit.precision.output_dtype"}


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Names of all settings, with dots."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if BaseModel in getattr(kind, "__mro__", ()):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def names_in(tree: ast.AST) -> set[str]:
    """Attributes that are read, and names that are used."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(f".{node.attr}")
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found


def derived() -> dict[str, set[str]]:
    functions: dict[str, set[str]] = {}
    for file in DERIVED:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, set()).update(names_in(node))
    return functions


def read_by(places: tuple[str, ...]) -> set[str]:
    """Attributes that these files and folders read, themselves or through a function of DERIVED."""
    files = [f for place in places for f in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))]
    waiting = set().union(*(names_in(ast.parse(file.read_text())) for file in files))
    functions, found = derived(), set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting |= functions.get(name.removeprefix("."), set())
    return {name.removeprefix(".") for name in found if name.startswith(".")}


def settings_read_by(places: tuple[str, ...]) -> set[str]:
    names = read_by(places)
    return {
        key for key in keys() if key.split(".")[-1] in names and not set(key.split(".")) & set(NOT_PLANNED_SECTIONS)
    }


@pytest.fixture(scope="module")
def table() -> tuple[set[str], set[str]]:
    """Settings that training reads, and those that the plan reads."""
    return settings_read_by(TRAINING), settings_read_by(PLAN)


def test_what_training_reads_is_planned_or_has_no_effect(table):
    training, of_plan = table
    assert training - of_plan == set(NOT_IN_THE_PLAN)


def test_what_the_plan_reads_is_trained_with(table):
    training, of_plan = table
    assert of_plan - training == set()


def test_no_section_is_left_out_that_the_plan_reads():
    attributes = read_by(PLAN)
    assert {name for name in NOT_PLANNED_SECTIONS if name in attributes} == set()
    assert {key.split(".")[1] for key in keys() if key.count(".") == 2} - set(NOT_PLANNED_SECTIONS) == {
        "precision",
        "mesh",
        "ddp",
        "checkpoint",
    }


def test_every_planned_setting_has_an_example(table):
    training, of_plan = table
    assert training & of_plan == set(EFFECTS) | WITHOUT_AN_EXAMPLE


def planned(
    capsys: pytest.CaptureFixture[str], settings: dict[str, str], device: tuple[str, ...] = ("--device", "h100-80")
) -> dict[str, Any]:
    pairs = {"num_processes": "8", "mixed_precision": "bf16", **settings}
    arguments = [part for key, value in pairs.items() for part in ("--set", f"{key}={value}")]
    code = run(["plan", "--model", MODEL, *device, "--batch-size", "2", "--tokens", "1B", "--json", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    answer = json.loads(out)
    return {key: answer[key] for key in ("world_size", "strategies", "chosen")}


@pytest.mark.slow
def test_every_planned_setting_changes_the_plan(capsys, tmp_path, monkeypatch):
    """The value against the same settings without it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    for key in EFFECTS.keys() - WITHOUT_AN_EXAMPLE:
        settings = EFFECTS[key]
        last = key.split(".")[-1]
        others = {name: value for name, value in settings.items() if not name.endswith(last)}
        assert len(others) < len(settings), key
        if key == "use_cpu":  # --device says otherwise
            assert planned(capsys, settings) == planned(capsys, others)
            assert planned(capsys, settings, ()) != planned(capsys, others, ())
        else:
            assert planned(capsys, settings) != planned(capsys, others), key


def test_an_unknown_way_of_offloading_is_refused(tmp_path):
    """Training offloads all shards, or activations; the plan takes the same keys."""
    for key in ("fsdp_config.fsdp_offload_optimizer", "shardkit.offload_fraction"):
        with pytest.raises(Exception, match="unknown"):
            resolve(None, {key: "true"}, defaults_for_hardware=False)


# Arguments of Accelerator: settings by another way, and those that change nothing in what a rank holds.
AS_SETTINGS = {
    *("mixed_precision", "gradient_accumulation_steps", "cpu", "config", "split_batches", "even_batches"),
    *("kwargs_handlers", "fsdp_plugin", "dataloader_config", "gradient_accumulation_plugin", "parallelism_config"),
    "dynamo_plugin",
}
WITHOUT_EFFECT = {
    *("project_dir", "project_config", "step_scheduler_with_optimizer", "device_placement", "rng_types", "log_with"),
}
# Flags of plan: what a script does, which no setting says; where it runs; how it is computed and shown.
OF_THE_SCRIPT = {"model", "batch_size", "seq_len", "optimizer", "loss", "ema", "batch", "tokens"}
OF_THE_SCRIPT |= {"lora", "lora_targets", "load_in_4bit"}
OF_THE_MACHINES = {"world", "per_machine", "device", "memory", "host_memory", "network", "price"}
OF_THE_MACHINES |= {"mtbf", "storage"}
OF_THE_COMMAND = {
    "of",
    "strategy",
    "simulate",
    "exact",
    "closed_form",
    "find",
    "plot",
    "measured",
    "config",
    "settings",
    "as_json",
}


def test_arguments_of_the_accelerator_and_flags_of_plan_are_known():
    arguments = set(inspect.signature(Accelerator.__init__).parameters) - {"self", "others"}
    assert arguments == AS_SETTINGS | WITHOUT_EFFECT
    assert set(inspect.signature(plan).parameters) == OF_THE_SCRIPT | OF_THE_MACHINES | OF_THE_COMMAND
