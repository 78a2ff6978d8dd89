"""The configuration of a run, given in code, by a file, or different on one rank; and the table that shows it."""

import json
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardkit import Accelerator, env
from shardkit.config import files
from shardkit.config.schema import Config, DistributedType
from shardkit.errors import ConfigError, Preempted, UsageError
from shardkit.runtime import settings, summary
from shardkit.runtime.steps import step_boundary
from tests.training import FULL, Model, Points


def test_a_flag_in_code_is_true_or_false_and_no_text():
    """As of a script's own flag without a type: "false" would be true."""
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu="false", split_batches="no", even_batches=2)
    assert str(caught.value).splitlines() == [
        "Accelerator(cpu=...): must be True or False (got 'false'); convert it.",
        "Accelerator(split_batches=...): must be True or False (got 'no'); convert it.",
        "Accelerator(even_batches=...): must be True or False (got 2); convert it.",
    ]


def test_settings_in_code_are_of_any_class_of_mappings_and_nothing_else():
    section = MappingProxyType({"seed": 5})
    given = MappingProxyType({"distributed_type": "NO", "use_cpu": True, "shardkit": section})
    assert Accelerator(config=given).config.shardkit.seed == 5
    with pytest.raises(ConfigError, match=r"config=\.\.\.\): expected settings, .*\(got SimpleNamespace\)"):
        Accelerator(config=SimpleNamespace(use_cpu=True))


def different_configurations() -> str:
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=FULL, gradient_accumulation_steps=1 + dist.get_rank())
    return str(caught.value)


def test_ranks_with_different_configurations_all_stop(ranks):
    first, second = ranks.run(2, different_configurations)
    assert first == second
    assert first.startswith(
        "Accelerator: ranks have different configurations (got shardkit.gradient_accumulation_steps: 1 on rank 0, "
        "2 on rank 1); give every machine the same file"
    )


@pytest.mark.parametrize(("variable", "are_told"), [(env.RESOLVED, False), ("SHARDKIT_CONFIG", True)])
def test_notes_on_settings_that_the_launcher_has_printed_are_not_repeated(
    tmp_path, monkeypatch, caplog, variable, are_told
):
    """A rank would name the launcher's temporary file, and of an elastic run settings that act in the launcher."""
    path = tmp_path / "config.yaml"
    path.write_text("num_processes: 1\nuse_cpu: true\nshardkit: {launch: {join_timeout_s: 5}, recompute_every: 2}\n")
    monkeypatch.setenv(variable, str(path))
    with caplog.at_level("INFO"):
        assert settings.settings(None).config.shardkit.recompute_every == 2
    assert ("recompute_every: has no effect" in caplog.text) is are_told


@pytest.mark.parametrize("chosen", [{}, {"num_processes": "--num-processes"}])
def test_settings_that_nobody_chose_are_not_those_of_the_launchers_file(tmp_path, monkeypatch, chosen):
    """Which has all of them: objects of a script would contradict it."""
    path = tmp_path / "config.yaml"
    path.write_text(files.dump(Config(num_processes=2, use_cpu=True)))
    path.with_suffix(".chosen.json").write_text(json.dumps(chosen))
    monkeypatch.setenv(env.RESOLVED, str(path))
    assert settings.settings(None).chosen == chosen


def test_a_missing_attribute_inside_a_property_is_named():
    class Mine(Accelerator):
        @property
        def rate(self) -> float:
            return self.config.no_such_setting

    with pytest.raises(AttributeError, match="no_such_setting"):
        _ = Mine(config={"use_cpu": True, "distributed_type": "NO"}).rate


def test_a_config_object_passes_the_checks_that_a_file_passes():
    wrong = Config(fsdp={"sharding_strategy": 3, "offload_params": True, "ignored_modules": "["}, num_machines=2)
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=wrong)
    text = str(caught.value)
    assert "Accelerator(config=...): fsdp.offload_params: needs a sharding strategy (got NO_SHARD)" in text
    assert "fsdp.ignored_modules: is not a regular expression" in text and "num_processes: is fewer than one" in text


def address_spelled_otherwise() -> int:
    address = ("localhost", "127.0.0.1")[dist.get_rank()]
    return Accelerator(config=FULL | {"num_machines": 2, "main_process_ip": address}).num_processes


def test_machines_may_spell_the_address_of_machine_0_each_in_their_way(ranks):
    assert ranks.run(2, address_spelled_otherwise) == [2, 2]


def other_world() -> tuple[str, int]:
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=FULL | {"num_processes": 3})
    return str(caught.value), caught.value.exit_code


@pytest.mark.requirement("B2")
def test_another_world_than_the_configured_one_is_an_error(ranks):
    for message, code in ranks.run(2, other_world):
        assert code == 2
        assert message == (
            "Accelerator(config=...): num_processes: 3 requested (got 2 launched); start as many ranks in all, or "
            "write num_processes: 2 there."
        )


@pytest.mark.requirement("A6")
def test_the_state_dict_type_is_set_for_the_rest_of_the_run():
    accelerator = Accelerator(config=Config(distributed_type=DistributedType.NO, use_cpu=True))
    plugin = accelerator.state.fsdp_plugin
    assert plugin.state_dict_type.value == "SHARDED_STATE_DICT"
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert accelerator.config.fsdp.state_dict_type.value == "FULL_STATE_DICT" == plugin.state_dict_type.value
    with pytest.raises(ConfigError, match=r"unknown kind \(got 'HALF'\); use SHARDED_STATE_DICT or FULL_STATE_DICT"):
        plugin.set_state_dict_type("HALF")
    assert accelerator.state.distributed_type is DistributedType.NO
    assert "rank 0 of 1" in repr(accelerator.state)


def test_code_replaces_the_file_and_the_table_says_so(tmp_path, capsys):
    path = tmp_path / "shardkit.yaml"
    path.write_text("distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: bf16\n")
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=4, config=path)
    assert accelerator.mixed_precision == "no" and accelerator.gradient_accumulation_steps == 4
    lines = summary.text(accelerator._run).splitlines()
    assert any(line.strip() == "Accelerator(mixed_precision=...): mixed_precision no" for line in lines)
    assert any(f"{path}:" in line for line in lines) and any("use_cpu True (line 2)" in line for line in lines)
    assert "mixed_precision: no from Accelerator(mixed_precision=...) replaces bf16 from" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"unknown precision \(got 'fp4'\); use no, fp16, bf16, fp8"):
        Accelerator(mixed_precision="fp4", config=path)
    with pytest.raises(ConfigError, match=r"must be an integer of at least 1 \(got 0\)"):
        accelerator.gradient_accumulation_steps = 0


def test_a_script_started_by_hand_is_one_process_and_says_so(tmp_path, capsys):
    path = tmp_path / "shardkit.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\n")
    accelerator = Accelerator(config=path)
    assert accelerator.num_processes == 1 and accelerator.distributed_type is DistributedType.NO
    assert "num_processes: 4 requested, but this script was started without a launcher" in capsys.readouterr().err


def test_a_script_started_by_hand_without_a_file_trains_in_plain_torch_as_launch_with_one_process_does(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert Accelerator().config.mode == "single"
    Path("shardkit.yaml").write_text("mixed_precision: bf16\n")
    assert files.resolve(ranks=1).config.mode == "fsdp", "the meaning of a file without distributed_type"


def test_what_accelerate_takes_and_shardkit_does_not_is_refused_in_words():
    with pytest.raises(UsageError) as caught:
        Accelerator(deepspeed_plugin=1, mixed_precison="no", fsdp_plugin=None)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "Accelerator(deepspeed_plugin=...): not supported (got 1); shardkit does not run DeepSpeed"
    )
    assert lines[1].endswith("unknown argument (got 'no'); did you mean mixed_precision?")
    accelerator = Accelerator(config=Config(distributed_type=DistributedType.NO, use_cpu=True), device_placement=True)
    with pytest.raises(AttributeError, match="lomo_backward is not part of shardkit; LOMO is not supported"):
        accelerator.lomo_backward(1)
    with pytest.raises(AttributeError, match=r"no attribute 'bakward'; did you mean backward\?"):
        _ = accelerator.bakward
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        accelerator.nonsense()
    assert accelerator.resume() is False


@pytest.mark.parametrize(("project_dir", "missing"), [(None, "project folder"), ("run", "automatic_checkpoint_naming")])
def test_what_a_script_lacks_for_checkpoints_by_the_step_is_named(project_dir, missing, monkeypatch):
    """A script that gives Accelerator a project_dir was told that it has none."""
    config = {"distributed_type": "NO", "use_cpu": True, "shardkit": {"checkpoint": {"resume": "auto"}}}
    accelerator = Accelerator(config=config, project_dir=project_dir)
    with pytest.raises(UsageError, match=rf"resume: auto needs a project folder to look in \(got no {missing}\); give"):
        accelerator.resume()
    monkeypatch.setattr(accelerator._run.watch, "pass_boundary", lambda *seen: True)
    with pytest.raises(Preempted, match=f"nothing was saved, because the script sets no {missing}: Accelerator"):
        step_boundary.pass_boundary(accelerator._run)


def table(config: dict) -> list[str]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    model = Model()
    model.head.requires_grad_(False)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    accelerator.prepare(model, DataLoader(Points(16), batch_size=4))
    return summary.text(accelerator._run).splitlines()


def test_the_table_counts_the_ranks_that_share_each_sequence_once(ranks):
    text = "\n".join(ranks.run(2, table, FULL | {"shardkit": {"mesh": {"context_size": 2}}})[0])
    assert "FULL_SHARD, mesh shard 2, sequences shared by 2 ranks" in text
    assert "4 x 1 group of 2 ranks x 2 micro-batches = 8 samples a step" in text


class Ready(Points):
    """Yields batches."""


BATCHES = [
    ({"batch_size": 4}, "4 x 1 rank x 2 micro-batches = 8 samples a step"),
    ({"batch_sampler": [[0, 1], [2, 3, 4]]}, "1 of list x 1 rank x 2 micro-batches a step"),
    ({"batch_size": None}, "1 of Ready x 1 rank x 2 micro-batches a step"),
]


@pytest.mark.parametrize(("options", "expected"), BATCHES)
def test_the_table_gives_a_number_of_samples_only_where_it_is_known(options, expected):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, gradient_accumulation_steps=2)
    accelerator.prepare(DataLoader(Ready(16), **options))
    (line,) = [line for line in summary.text(accelerator._run).splitlines() if line.startswith("  batch ")]
    assert line.removeprefix("  batch").strip() == expected


def test_models_that_are_prepared_one_by_one_are_all_shown(capsys):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    for model, shown in ((nn.Linear(2, 3), "Linear: 9 parameters"), (nn.Bilinear(2, 2, 1), "Bilinear: 5 parameters")):
        prepared = accelerator.prepare(model)
        accelerator.prepare(prepared, torch.optim.SGD(model.parameters(), lr=0.1))
        said = capsys.readouterr().err
        assert said.count("what runs") == 1 and said.count("  model ") == 1 and shown in said
        assert ("world" in said) == (shown[:6] == "Linear")
    accelerator.free_memory()
    accelerator.prepare(nn.Linear(2, 3))
    assert "world" in capsys.readouterr().err


def precision_of_fp64() -> str:
    accelerator = Accelerator(config=FULL)
    accelerator.prepare(Model().double())
    (line,) = [line for line in summary.text(accelerator._run).splitlines() if "precision" in line]
    return line


def test_the_table_says_that_fp64_gradients_are_reduced_in_fp64(ranks):
    assert "gradients reduced in float64" in ranks.run(2, precision_of_fp64)[0]


def test_the_table_says_what_runs(ranks):
    config = FULL | {"mixed_precision": "bf16", "fsdp_config": {"fsdp_sharding_strategy": 2}}
    lines = ranks.run(2, table, config)[0]
    text = "\n".join(lines)
    assert lines[:3] == ["what runs", "  world      2 ranks, cpu, gloo", "  strategy   SHARD_GRAD_OP, mesh shard 2"]
    assert "Model: 213 parameters, 9.9% frozen" in text
    assert "blocks.0.up.weight = blocks.1.up.weight" in text
    assert "parameters fp32, compute bf16, gradients reduced in fp32, outputs fp32" in text
    assert "4 x 2 ranks x 2 micro-batches = 16 samples a step" in text
    assert "units      1 x Block (69), root (144)" in text  # the root has the shared weight
    assert "fsdp.sharding_strategy SHARD_GRAD_OP" in text
    assert "num_processes" not in text  # the world is the launcher's, which the code does not set
