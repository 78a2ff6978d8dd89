"""Settings that a script gives as objects: the YAML's names, checks and table; contradictions name both places."""

from typing import Any

import pytest

from shardkit import Accelerator, ProjectConfiguration, compat
from shardkit.errors import ConfigError, UsageError
from shardkit.runtime import summary

ALONE = {"distributed_type": "NO", "use_cpu": True}


class Says:
    """An object as shardkit.compat's are."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {name.replace("__", "."): value for name, value in settings.items()}

    def shardkit_settings(self) -> dict[str, Any]:
        return self.settings


class Plugin(Says): ...


def accelerator(**arguments: Any) -> Accelerator:
    return Accelerator(config=ALONE, **arguments)


def test_what_objects_say_runs_and_the_table_names_them():
    given = accelerator(
        kwargs_handlers=[Says(shardkit__precision__init_scale="1e3"), Says(shardkit__ddp__bucket_cap_mb=5)],
        gradient_accumulation_plugin=Plugin(shardkit__gradient_accumulation_steps="4"),
        dataloader_config=Says(shardkit__data__split_batches="yes", shardkit__data__even_batches=False),
        fsdp_plugin=Plugin(fsdp_config__fsdp_reshard_after_forward=False, fsdp__offload_params=None),
        dynamo_plugin=None,
        rng_types=["torch", "cuda"],
    )
    config = given.config
    assert config.shardkit.precision.init_scale == 1000 and config.shardkit.ddp.bucket_cap_mb == 5
    assert given.gradient_accumulation_steps == 4
    assert config.shardkit.data.split_batches and not config.shardkit.data.even_batches
    assert config.fsdp.sharding_strategy.value == "SHARD_GRAD_OP" and not config.fsdp.offload_params
    lines = summary.text(given._run)
    assert "Accelerator(gradient_accumulation_plugin=Plugin): shardkit.gradient_accumulation_steps 4" in lines
    assert "Accelerator(fsdp_plugin=Plugin): fsdp.sharding_strategy SHARD_GRAD_OP" in lines


def test_one_object_outside_of_a_list_is_told_so():
    with pytest.raises(ConfigError, match=r"kwargs_handlers=\.\.\.\): must be a list of settings objects \(got Says\)"):
        accelerator(kwargs_handlers=Says())
    with pytest.raises(ConfigError, match=r"kwargs_handlers=\.\.\.\): must be a list of settings objects \(got Says\)"):
        compat.Accelerator(kwargs_handlers=Says())


def test_a_contradiction_names_both_places(tmp_path):
    path = tmp_path / "shardkit.yaml"
    path.write_text("distributed_type: 'NO'\nuse_cpu: true\nshardkit:\n  gradient_accumulation_steps: 8\n")
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=path, gradient_accumulation_plugin=Plugin(shardkit__gradient_accumulation_steps=4))
    assert str(caught.value) == (
        f"Accelerator(gradient_accumulation_plugin=Plugin): shardkit.gradient_accumulation_steps: 4 here, but 8 from "
        f"{path}:4:32; keep one of them."
    )
    same = Accelerator(config=path, gradient_accumulation_plugin=Plugin(shardkit__gradient_accumulation_steps="8"))
    assert same.gradient_accumulation_steps == 8
    with pytest.raises(ConfigError, match=r"6 here, but 5 from Accelerator\(gradient_accumulation_steps=\.\.\.\)"):
        accelerator(
            gradient_accumulation_steps=5,
            gradient_accumulation_plugin=Plugin(shardkit__gradient_accumulation_steps=6),
        )
    with pytest.raises(
        ConfigError, match=r"kwargs_handlers=Plugin\): shardkit.compile: False here, but True from .*Says"
    ):
        accelerator(kwargs_handlers=[Says(shardkit__compile=True), Plugin(shardkit__compile=False)])
    path.write_text("use_cpu: true\nfsdp_config:\n  fsdp_sharding_strategy: 1\n")
    with pytest.raises(ConfigError, match=r"means SHARD_GRAD_OP, but .* in .*shardkit.yaml:3:27 says FULL_SHARD; keep"):
        Accelerator(config=path, fsdp_plugin=Plugin(fsdp_config__fsdp_reshard_after_forward=False))


def test_the_checks_are_those_of_the_file():
    with pytest.raises(ConfigError) as caught:
        accelerator(kwargs_handlers=[Says(shardkit__ddp__comm_hok="fp16", fsdp_config=1, num_processes=2)])
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("unknown setting (got shardkit.ddp.comm_hok); did you mean shardkit.ddp.comm_hook?")
    assert "fsdp_config is a block of settings" in lines[1]
    assert "num_processes: is read before the script runs (got 2)" in lines[2]
    with pytest.raises(ConfigError) as caught:
        accelerator(
            kwargs_handlers=[
                Says(shardkit__ddp__comm_hook="fp8", shardkit__precision__growth_factor=0.5, num_proceses=2),
                Says(shardkit__profile__wait=1, shardkit__profile__activities=["tpu"]),
                Says(shardkit__ddp__comm_wrapper="bf16"),
            ]
        )
    text = str(caught.value)
    assert "Accelerator(kwargs_handlers=Says): unknown setting (got num_proceses); did you mean num_processes?" in text
    assert "Accelerator(kwargs_handlers=Says): shardkit.ddp.comm_hook: is not one of the choices (got 'fp8')" in text
    assert "shardkit.precision.growth_factor: is too small (got '0.5'); write more than 1." in text
    assert "shardkit.profile.wait: is part of a schedule, which records no step (got active 0)" in text
    assert "shardkit.profile.activities: is not cpu or cuda (got 'tpu')" in text
    with pytest.raises(
        ConfigError, match=r"comm_hook: is not supported .*; torch's implementation fails in its first step; use"
    ):
        accelerator(kwargs_handlers=[Says(shardkit__ddp__comm_hook="batched_power_sgd")])
    with pytest.raises(ConfigError, match=r"comm_wrapper: is the dtype of power_sgd"):
        accelerator(kwargs_handlers=[Says(shardkit__ddp__comm_wrapper="bf16")])


def test_an_object_that_says_nothing_is_refused_in_words():
    from accelerate.utils import FullyShardedDataParallelPlugin, ProfileKwargs
    from accelerate.utils import ProjectConfiguration as Theirs

    with pytest.raises(ConfigError) as caught:
        accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), kwargs_handlers=[ProfileKwargs(), 1, Says])
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "Accelerator(fsdp_plugin=...): is an object of the package accelerate (got "
        "accelerate.utils.dataclasses.FullyShardedDataParallelPlugin); use "
        "shardkit.compat.FullyShardedDataParallelPlugin, or write its settings into shardkit.yaml under fsdp_config."
    )
    assert "use shardkit.compat.ProfileKwargs" in lines[1]
    assert "is not a settings object (got 1)" in lines[2] and "shardkit_settings() -> {name: value}" in lines[2]
    assert "the class Says" in lines[3]
    with pytest.raises(ConfigError, match=r"use shardkit\.compat\.ProjectConfiguration"):
        accelerator(project_config=Theirs(project_dir="runs"))
    with pytest.raises(UsageError, match="a checkpoint is written once"):
        ProjectConfiguration(save_on_each_node=True)

    class Wrong:
        def shardkit_settings(self) -> list[str]:
            return []

    with pytest.raises(ConfigError, match="must return a dict of settings by name"):
        accelerator(kwargs_handlers=[Wrong()])


def test_a_project_takes_what_accelerates_does_in_its_order_and_refuses_what_is_set_later():
    project = ProjectConfiguration("runs", "logs", True, 3)
    assert (project.logging_dir, project.automatic_checkpoint_naming, project.total_limit) == ("logs", True, 3)
    with pytest.raises(UsageError, match=r"logging_dir=\.\.\.\): trackers write files \(got True\)"):
        ProjectConfiguration("runs", True)
    with pytest.raises(UsageError, match="a checkpoint is written once"):
        project.save_on_each_node = True
    with pytest.raises(UsageError, match=r"not a number of checkpoints to keep \(got 0\)"):
        project.total_limit = 0


@pytest.mark.parametrize("given", ["3", 0, -1, 2.5])
def test_a_limit_that_is_no_number_of_checkpoints_is_refused_before_the_first_save(given):
    """A text, as of an argument without type=int, was met on rank 0 alone, after its first save."""
    with pytest.raises(UsageError, match=r"total_limit=.*: not a number of checkpoints to keep \(got '?[-0-9.]+'?\)"):
        ProjectConfiguration(total_limit=given)


def test_a_project_takes_its_folder_later():
    project = ProjectConfiguration(logging_dir="logs")
    project.set_directories("runs")
    assert (project.project_dir, project.logging_dir) == ("runs", "logs")
    given = accelerator(project_dir="here")
    assert given.project_dir == given.logging_dir == "here"


def ranks_disagree() -> str:
    import torch.distributed as dist

    steps = 2 + dist.get_rank()
    with pytest.raises(ConfigError) as caught:
        Accelerator(
            config={"distributed_type": "FSDP", "use_cpu": True},
            gradient_accumulation_plugin=Plugin(shardkit__gradient_accumulation_steps=steps),
        )
    return str(caught.value)


def test_ranks_must_give_the_same(ranks):
    for text in ranks.run(2, ranks_disagree):
        assert "shardkit.gradient_accumulation_steps: 2 on rank 0, 3 on rank 1" in text
