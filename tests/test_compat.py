"""shardkit.compat: plugins, states, the facade, and the attributes that scripts set on it."""

import inspect
import io
import json
import logging
import sys
from datetime import timedelta
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecision, StateDictType
from torch.distributed.fsdp import ShardingStrategy as Torchs
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from shardkit.compat import Accelerator
from shardkit.compat.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from shardkit.compat.kinds import DistributedType, DynamoBackend, PrecisionType
from shardkit.compat.local_sgd import LocalSGD
from shardkit.compat.mesh_sizes import ParallelismConfig
from shardkit.compat.models import get_mixed_precision_context_manager
from shardkit.compat.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from shardkit.compat.states import AcceleratorState, PartialState, is_initialized, kind_of
from shardkit.config.keys import resolve_name
from shardkit.config.schema import ShardingStrategy
from shardkit.errors import MachineError, UsageError
from shardkit.runtime import process_control
from shardkit.runtime.project import ProjectConfiguration
from tests.ranks import log_lines

ALONE = {"distributed_type": "NO", "use_cpu": True}
# ---- kinds and plugins ----


def test_kinds_are_equal_to_their_texts_and_list_their_members():
    assert DistributedType.FSDP == "FSDP" and DistributedType("MULTI_XPU")
    assert "bf16" in PrecisionType and "bf17" not in PrecisionType and str(PrecisionType.BF16) == "bf16"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def settings_are_known(said: dict) -> bool:
    return all(resolve_name(name) is not None for name in said)


def test_what_plugins_say_has_names_of_ours():
    said = FullyShardedDataParallelPlugin(
        sharding_strategy=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap="Block, Other",
        cpu_offload=True,
        state_dict_type="sharded_state_dict",
        mixed_precision_policy={"param_dtype": torch.bfloat16},
        activation_checkpointing=True,
        activation_checkpointing_offload=True,
    ).shardkit_settings()
    assert said["shardkit.offload_activations"] is True
    assert settings_are_known(said)
    assert said["fsdp_config.fsdp_sharding_strategy"] == "SHARD_GRAD_OP"
    assert said["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] == ["Block", "Other"]
    assert said["shardkit.precision.param_dtype"] == "bf16"
    assert "fsdp_config.fsdp_min_num_params" not in said, "only what was said"
    for one in (
        DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10, comm_hook="bf16"),
        GradScalerKwargs(init_scale=8.0, growth_interval=5),
        InitProcessGroupKwargs(timeout=timedelta(minutes=3)),
        GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False),
        DataLoaderConfiguration(split_batches=True, even_batches=False, data_seed=3),
        TorchDynamoPlugin(backend="inductor"),
        ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    ):
        said = one.shardkit_settings()
        assert said and settings_are_known(said), one
    for quiet in (DistributedDataParallelKwargs(), DataLoaderConfiguration(), TorchDynamoPlugin(), ParallelismConfig()):
        assert quiet.shardkit_settings() == {}


def test_a_policy_with_its_block_classes_or_its_size_is_read_whole(clean_states):
    by_class = partial(transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.Linear, torch.nn.LSTM})
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=by_class)
    assert Accelerator(cpu=True, fsdp_plugin=plugin).config.fsdp.transformer_layer_cls_to_wrap == ["LSTM", "Linear"]
    by_size = partial(size_based_auto_wrap_policy, min_num_params=2000)
    for size in ({}, {"min_num_params": 3000}):
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=by_size, **size)
        found = Accelerator(cpu=True, fsdp_plugin=plugin).config.fsdp
        assert found.auto_wrap_policy == "SIZE_BASED_WRAP"
        assert found.min_num_params == size.get("min_num_params", 2000)


@pytest.mark.slow
def test_the_policy_of_peft_means_the_blocks_that_prepare_finds(clean_states):
    other = pytest.importorskip("peft.utils.other")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model._no_split_modules = {"Linear"}
    policy = other.fsdp_auto_wrap_policy(model)
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=policy)
    found = Accelerator(cpu=True, fsdp_plugin=plugin)
    assert found.config.fsdp.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    found.state.fsdp_plugin.auto_wrap_policy = policy  # as the recipe does after the Trainer was made


def test_torchs_enumerations_are_read_as_their_names(clean_states):
    for said, strategy in (("_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"), ("SHARD_GRAD_OP", "SHARD_GRAD_OP")):
        plugin = FullyShardedDataParallelPlugin(sharding_strategy=Torchs[said])
        assert plugin.shardkit_settings()["fsdp_config.fsdp_sharding_strategy"] == strategy
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=Torchs.SHARD_GRAD_OP)
    assert Accelerator(cpu=True, fsdp_plugin=plugin).config.fsdp.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP


def test_load_takes_an_open_file(tmp_path):
    load, file = import_module("shardkit.compat.utils").load, io.BytesIO()
    torch.save({"a": torch.ones(1)}, file)
    file.seek(0)
    assert load(file)["a"] == 1
    with pytest.raises(UsageError, match="not a file of safetensors, JSON or torch"):
        load(io.BytesIO(b"text"))


def test_what_plugins_cannot_say_is_refused_with_all_problems_at_once():
    policy = MixedPrecision(param_dtype=torch.float64)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy, auto_wrap_policy="blocks")
    with pytest.raises(UsageError, match=r"(?s)\(got param_dtype=float64\).*\(got 'BLOCKS'\); use one of TRANS"):
        plugin.shardkit_settings()
    with pytest.raises(UsageError, match=r"set_state_dict_type: is not one of the choices \(got 'HALF'\); use one of"):
        plugin.set_state_dict_type("half")
    with pytest.raises(UsageError, match=r"(?s)ignored_modules: module objects.*param_init_fn: .*remove it"):
        FullyShardedDataParallelPlugin(param_init_fn=print, ignored_modules=[]).shardkit_settings()
    with pytest.raises(UsageError, match=r"got tp_size=2\); use dp_shard_size, dp_replicate_size and cp"):
        ParallelismConfig(tp_size=2)
    with pytest.raises(UsageError, match=r"only inductor is supported \(got ONNXRT\)"):
        TorchDynamoPlugin(backend="onnxrt").shardkit_settings()
    options = {"mode": "max-autotune", "fullgraph": True, "dynamic": False}
    with pytest.raises(UsageError, match=r"\(got mode='max-autotune', fullgraph=True\); leave it out, or call"):
        TorchDynamoPlugin(backend="inductor", **options).shardkit_settings()
    assert TorchDynamoPlugin(backend="inductor", mode="default").shardkit_settings() == {"shardkit.compile": True}
    with pytest.raises(UsageError, match=r"shardkit has no such setting \(got dim=1\)"):
        DistributedDataParallelKwargs(dim=1).shardkit_settings()


# ---- states and the facade, on ranks ----


def states_are_shared_and_reset():
    assert not is_initialized()
    partial = PartialState()
    assert PartialState._shared_state and PartialState().device is partial.device
    assert partial.distributed_type == "MULTI_CPU" and partial.use_distributed
    accelerator = Accelerator()
    assert is_initialized() and AcceleratorState().distributed_type == accelerator.distributed_type == "FSDP"
    assert accelerator.state.fsdp_plugin.sharding_strategy == "FULL_SHARD"
    assert "FULL_STATE_DICT" in str(accelerator.state.fsdp_plugin.state_dict_type)
    plugin = accelerator.state.fsdp_plugin
    plugin.activation_checkpointing, plugin.auto_wrap_policy, plugin.cpu_offload = False, plugin.auto_wrap_policy, False
    with pytest.raises(
        UsageError, match=r"fsdp_plugin\.activation_checkpointing: is fixed when .* \(got True, the run"
    ):
        plugin.activation_checkpointing = True
    with pytest.raises(UsageError, match=r"set fsdp_config\.fsdp_auto_wrap_policy in shardkit\.yaml"):
        plugin.auto_wrap_policy = "NO_WRAP"
    accelerator.state.fsdp_plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert accelerator.config.fsdp.state_dict_type == "SHARDED_STATE_DICT"
    accelerator.state.fsdp_plugin.state_dict_type = StateDictType.FULL_STATE_DICT  # torch's
    assert accelerator.config.fsdp.state_dict_type == "FULL_STATE_DICT"
    with pytest.raises(UsageError, match=r"state_dict_type: is not one of the choices \(got 'LOCAL'\)"):
        accelerator.state.fsdp_plugin.state_dict_type = "local"
    with pytest.raises(UsageError, match="is no already"):
        AcceleratorState(mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(AttributeError, match="the state was reset"):
        _ = partial.device
    with pytest.raises(AttributeError, match="create an Accelerator"):
        _ = accelerator.state.fsdp_plugin
    assert PartialState().num_processes == 2
    return PartialState().process_index


def test_states_are_shared_and_reset(ranks):
    assert ranks.run(2, states_are_shared_and_reset) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_told"), [("SHARDED_STATE_DICT", True), ("FULL_STATE_DICT", False), (None, False)])
def test_the_trainer_writes_no_sharded_model_and_that_is_told(clean_states, monkeypatch, kind, is_told):
    monkeypatch.setitem(sys.modules, "transformers.trainer", sys)
    settings = {"use_cpu": True, "distributed_type": "FSDP", "num_processes": 1}
    settings |= {"fsdp_config": {"fsdp_state_dict_type": kind}} if kind else {}
    with log_lines(level=logging.WARNING) as lines:
        Accelerator(config=settings).end_training()
    assert any("the Trainer's save_model writes nothing; set FULL_STATE_DICT" in line for line in lines) == is_told


def test_what_the_first_state_was_given_is_the_accelerators_too(clean_states):
    PartialState(cpu=True, timeout=timedelta(seconds=77))
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    assert accelerator.config.shardkit.launch.process_group_timeout_s == 77.0
    assert accelerator.config.use_cpu
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, timeout=timedelta(seconds=99))  # the group that is up keeps what it has
    assert Accelerator().config.shardkit.launch.process_group_timeout_s == 77.0


def a_loop_that_counts_its_own_windows():
    """As the Trainer's: no accumulate(), but gradient_state._set_sync_gradients and no_sync."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(32.0).reshape(8, 4) / 10
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=1))
    seen = []
    for number, batch in enumerate(loader):
        is_last = number % 2 == 1
        accelerator.gradient_state._set_sync_gradients(is_last)
        apart = model.no_sync() if number else accelerator.no_sync(model)
        with torch.enable_grad() if is_last else apart:
            accelerator.backward(model(batch).mean() / 2)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((accelerator.sync_gradients, accelerator.gradient_state.end_of_dataloader))
    whole = accelerator.get_state_dict(model)
    accelerator.end_training()
    return seen, {name: value.tolist() for name, value in whole.items()}


def test_a_loop_that_counts_its_own_windows_is_plain_torch(ranks):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(32.0).reshape(8, 4) / 10
    for window in data.split(4):
        model(window).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, whole = ranks.run(2, a_loop_that_counts_its_own_windows)[0]
    assert seen == [(False, False), (True, False), (False, False), (True, True)]
    for name, value in model.state_dict().items():
        assert torch.allclose(torch.tensor(whole[name]), value, atol=1e-6)


def weights_after(steps_apart):
    """Of a loop of 6 batches, with LocalSGD or with DDP's exchange in every step; whether ranks differed inside."""
    accelerator, rank = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True}), dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    have_differed = False
    with LocalSGD(accelerator, model, steps_apart or 1, enabled=steps_apart is not None) as local:
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            weights = accelerator.gather(model.weight.detach()[None])
            have_differed |= not torch.equal(weights[0], weights[1])
    whole = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    with pytest.raises(UsageError, match=r"LocalSGD: every rank needs all weights \(got FSDP\)"):
        LocalSGD(whole, model, 2)
    with LocalSGD(whole, model, 2, enabled=False) as off:
        off.step()
    return model.weight.detach().clone(), have_differed


def test_local_sgd_takes_the_mean_of_weights_now_and_then(ranks):
    (every, never), (one, _) = ranks.run(2, weights_after, None)[0], ranks.run(2, weights_after, 1)[1]
    assert torch.allclose(every, one, atol=1e-6) and not never, "the mean after each step of SGD is that of gradients"
    (first, differed), (second, _) = ranks.run(2, weights_after, 4)
    assert torch.equal(first, second) and differed and not torch.allclose(first, one, atol=1e-6)


class Rows:
    """What a `datasets.Dataset` is: a slice gives columns."""

    column_names = ("a",)

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def select(self, chosen):
        return Rows([self.rows[number] for number in chosen])


def test_a_dataset_is_split_by_rows():
    assert [process_control.part_of(Rows("abcde"), rank, 2).rows for rank in (0, 1)] == [["a", "b", "c"], ["d", "e"]]
    assert process_control.part_of(Rows("abcde"), 1, 2, apply_padding=True).rows == ["d", "e", "e"]


def test_one_process_runs_what_is_for_any_rank(clean_states):
    assert PartialState(cpu=True).on_process(lambda: "here", process_index=3)() == "here"
    assert Accelerator(cpu=True).on_local_process(local_process_index=1)(lambda: "here")() == "here"


def saves_of_the_main_process(folder):
    """As scripts for diffusion models save: without the other ranks. What is loaded on all of them goes on alike."""
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    loader = torch.utils.data.DataLoader(torch.arange(36.0).reshape(12, 3) / 36, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 0.1), loader)
    is_sharded = accelerator.distributed_type == "FSDP"

    def train():
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.gather(model.weight.detach()[None]).tolist()

    def save(name):
        accelerator.save_state(folder / name)

    train()
    if accelerator.is_main_process and len(loader) > 1:
        save("in a function")
        accelerator.save_model(model, folder / "model")
    if accelerator.is_main_process or is_sharded:
        accelerator.save_state(folder / "or")
    if not accelerator.is_main_process:
        assert accelerator.process_index == 1
    else:
        accelerator.save_state(folder / "number")
    accelerator.on_main_process(save)("decorated")
    if accelerator.sync_gradients:
        accelerator.save_state(folder / "all")
    accelerator.wait_for_everyone()
    expected = train()
    found = []
    for name in ("in a function", "or", "number", "decorated", "all"):
        accelerator.load_state(folder / name)
        found.append(train())
    is_sharded = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    said = ""
    if is_sharded.is_main_process:
        try:
            is_sharded.save_state(folder / "never")
        except UsageError as error:
            said = str(error)
    return expected, found, said


def test_the_main_process_saves_alone_where_the_script_says_so(ranks, tmp_path):
    (expected, found, said), (_, others, nothing) = ranks.run(2, saves_of_the_main_process, tmp_path)
    assert found == others == [expected] * 5
    assert said.startswith("save_state: every rank must call it, but only some do (got ")
    assert "test_compat.py:" in said and said.endswith("call it outside of the condition.")
    assert nothing == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "all",
        "decorated",
        "in a function",
        "model",
        "number",
        "or",
    ]


def state_dict_on_the_main_process(strategy: str):
    """What a trainer's own save, which returns early on other ranks, gets: by a method, as in many libraries."""
    accelerator = Accelerator(config={"distributed_type": strategy, "use_cpu": True})
    model, plain = accelerator.prepare(torch.nn.Linear(2, 1)), torch.nn.Linear(2, 1)

    def save(which):
        if not accelerator.is_local_main_process:
            return []
        return sorted(accelerator.get_state_dict(which))

    names = save(plain)
    try:
        return names + save(model)
    except UsageError as error:
        return str(error)


def test_the_state_dict_of_a_sharded_model_is_asked_for_on_every_rank(ranks):
    assert ranks.run(2, state_dict_on_the_main_process, "MULTI_CPU") == [["bias", "weight"] * 2, []]
    refused, nothing = ranks.run(2, state_dict_on_the_main_process, "FSDP")
    assert refused.startswith("get_state_dict: every rank must call it, but only some do (got the condition at ")
    assert nothing == []


def plateau_on_the_main_process():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    schedule.step(1.0)
    if accelerator.is_main_process:
        with pytest.raises(UsageError) as caught:
            schedule.step(0.5)
        return str(caught.value)
    return None


def test_a_schedule_by_a_metric_is_stepped_on_every_rank(ranks):
    refused, _ = ranks.run(2, plateau_on_the_main_process)
    assert refused.startswith("scheduler.step: every rank must call it, but only some do (got the condition at ")


def test_scripts_make_schedulers_of_accelerates_class(clean_states):
    made = import_module("shardkit.compat.scheduler").AcceleratedScheduler
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(UsageError, match=r"AcceleratedScheduler: not a prepared optimizer \(got SGD\); give the"):
        made(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    with_optimizer = made(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), optimizer)
    always = made(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), [optimizer], step_with_optimizer=False)
    assert isinstance(always, made) and isinstance(accelerator.prepare(with_optimizer), made)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            with_optimizer.step()
            always.step()
    assert (with_optimizer.scheduler.last_epoch, always.scheduler.last_epoch) == (1, 2)


def ends_on_the_main_process(folder):
    accelerator = Accelerator(cpu=True, project_dir=folder)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    if accelerator.is_main_process:
        accelerator.end_training()
    accelerator.wait_for_everyone()
    return accelerator.trackers


def test_the_main_process_ends_the_trackers_alone_where_the_script_says_so(ranks, tmp_path):
    assert ranks.run(2, ends_on_the_main_process, tmp_path)[0] == []
    assert "loss" in (tmp_path / "run" / "metrics.jsonl").read_text()


def schedules_as_asked_for(meaning):
    import os

    os.environ["SHARDKIT_ACCELERATES_MEANING"] = meaning
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    schedule.step()
    accelerator.end_training()
    return optimizer.param_groups[0]["lr"]


def test_a_schedule_steps_once_and_once_a_rank_where_that_is_asked_for(ranks):
    assert ranks.run(2, schedules_as_asked_for, "") == [0.5, 0.5]
    assert ranks.run(2, schedules_as_asked_for, "scheduler") == [0.25, 0.25]


def saved_as_accelerate_does(folder, meaning):
    """The refusals of saves of a script's own checkpoint of a sharded model: by both names, and on one rank only."""
    import os

    from shardkit.compat.utils import save

    os.environ["SHARDKIT_ACCELERATES_MEANING"] = meaning
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
    expected = accelerator.unwrap_model(model).weight.full_tensor()
    checkpoint = {"model": model.state_dict(), "opt": optimizer.state_dict(), "ema": [model.weight], "epoch": 1}
    told = []
    for number, call in enumerate((accelerator.save, save)):
        try:
            call(checkpoint, folder / f"{number}.pt")
        except UsageError as error:
            told.append(str(error))
            continue
        if accelerator.is_main_process and meaning:
            found = torch.load(folder / f"{number}.pt")
            assert found["model"]["weight"].equal(expected) and found["ema"][0].equal(expected)
            assert found["opt"]["state"][0]["exp_avg"].shape == (2, 2) and found["epoch"] == 1
    if accelerator.is_main_process:
        try:
            accelerator.save({"w": model.weight}, folder / "never")
        except UsageError as error:
            told.append(str(error))
    accelerator.end_training()
    return told


def test_a_checkpoint_of_the_scripts_own_has_whole_tensors(ranks, tmp_path):
    (refused,), nothing = ranks.run(2, saved_as_accelerate_does, tmp_path, "save")
    assert refused.startswith("save: every rank must call it, but only some do (got ") and nothing == []
    for told in ranks.run(2, saved_as_accelerate_does, tmp_path, "")[0][:2]:
        assert (
            "split the object, or launch with --as-accelerate --accelerates-meaning save, which uses torch.save" in told
        )


def saved_on_machines_of_two(folder, each):
    """Every rank has a folder of its own, as if none were shared; those that have a file then."""
    import os

    from shardkit.compat.utils import save

    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    (folder / f"{rank}").mkdir(parents=True)
    save({"epoch": 1}, folder / f"{rank}" / "state.json", save_on_each_node=each)
    return (folder / f"{rank}" / "state.json").exists()


def test_a_file_is_written_once_or_once_a_machine(ranks, tmp_path):
    assert ranks.run(4, saved_on_machines_of_two, tmp_path / "once", False) == [True, False, False, False]
    assert ranks.run(4, saved_on_machines_of_two, tmp_path / "each", True) == [True, False, True, False]


def trainers_files(folder, kind, is_new=False):
    from shardkit.compat.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step():
        accelerator.backward(model(torch.ones(2, 4)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    step()
    before = torch.get_rng_state()
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    expected = step()
    step()
    load_fsdp_model(plugin, accelerator, model, folder)
    if is_new:
        optimizer = accelerator.prepare(getattr(torch.optim, kind)(model.parameters(), lr=0.1))
        before = torch.get_rng_state()
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    assert torch.equal(before, torch.get_rng_state()), "random generators are the script's own"
    again = step()
    return all(torch.equal(again[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_the_trainers_files_of_a_model_and_an_optimizer_come_back(ranks, tmp_path):
    whole = tmp_path / "whole"  # state of full tensors, loaded into a new optimizer
    assert ranks.run(2, trainers_files, str(whole), "Adafactor", True) == [True, True]
    tmp_path /= "each"
    assert ranks.run(2, trainers_files, str(tmp_path), "AdamW") == [True, True]
    assert {path.name for path in tmp_path.iterdir()} == {"pytorch_model_fsdp_0", "optimizer_0"}
    stored = sum(path.stat().st_size for path in (tmp_path / "optimizer_0").rglob("*.safetensors"))
    assert stored > 0


def trainers_files_of_another_kind(folder):
    from shardkit.compat.utils import load_fsdp_model, load_fsdp_optimizer

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    texts = []
    for load, objects in ((load_fsdp_model, (model,)), (load_fsdp_optimizer, (optimizer, model))):
        with pytest.raises(FileNotFoundError) as error:
            load(None, accelerator, *objects, folder)
        texts.append(str(error.value))
    return texts


def test_a_trainers_checkpoint_of_ddp_or_deepspeed_is_named_as_such_under_fsdp(ranks, tmp_path):
    (tmp_path / "model.safetensors").touch()
    for of_model, of_optimizer in ranks.run(2, trainers_files_of_another_kind, str(tmp_path)):
        assert of_model == (
            f"checkpoint: {tmp_path}: was not saved under FSDP with shardkit (no pytorch_model_fsdp_0); resume with "
            "the distributed_type that it was saved with, or begin a new run with its weights: "
            f"from_pretrained('{tmp_path}'), without resume_from_checkpoint."
        )
        assert "(no optimizer_0)" in of_optimizer


def test_a_command_that_starts_accelerate_launch_is_told_which_script_to_start():
    from shardkit.compat.commands.launch import launch_command_parser

    with pytest.raises(UsageError, match=r"start the script itself with shardkit launch, such as -m trl\.scripts\.sft"):
        launch_command_parser()


def test_arguments_of_accelerates_that_shardkit_does_not_run_are_refused(clean_states):
    with pytest.raises(UsageError, match="does not run DeepSpeed"):
        Accelerator(deepspeed_plugin=object())
    with pytest.raises(UsageError, match=r"Accelerator\(typo=...\): unknown argument \(got False\)"):
        Accelerator(typo=False)
    others = {"deepspeed_plugin": None, "log_with": [], "use_seedable_sampler": False}
    accelerator = Accelerator(cpu=True, even_batches=False, **others)
    assert not accelerator.even_batches, "an argument of older versions"
    with pytest.raises(UsageError, match="both given"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(3))
    with pytest.raises(MachineError, match=r"fp8 needs a GPU of compute capability 8\.9 \(got cpu\); write bf16"):
        Accelerator(mixed_precision="fp8")


def test_tpus_have_their_own_distributed_type_on_any_number_of_ranks():
    for mode in ("xla", "ddp"):  # of an Accelerator; of a PartialState before it
        for world_size in (1, 8):
            assert kind_of(mode, world_size, torch.device("xla")) is DistributedType.XLA


def test_the_autocast_context_of_an_fp8_run_is_bf16(clean_states):
    AcceleratorState(mixed_precision="fp8", cpu=True)
    with get_mixed_precision_context_manager(native_amp=True):
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16


def test_a_model_is_unwrapped_from_its_mixed_precision_where_that_is_asked_for(clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, mixed_precision="bf16")
    model, seen = torch.nn.Sequential(torch.nn.Linear(1, 1)), []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    prepared = accelerator.prepare(model)
    for keeps in (True, False):
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=keeps)(torch.ones(1, 1))
    assert seen == [torch.bfloat16, torch.float32]


def test_the_facade_takes_accelerates_arguments_in_its_order():
    found = [*inspect.signature(Accelerator.__init__).parameters][1:5]
    assert found == ["device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps"]


def test_log_accepts_dicts_of_numbers_and_anything_before_the_trackers_start(clean_states, tmp_path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    accelerator.log(torch.ones(2, 3), step=1)  # images of a library's trainer, without a tracker
    accelerator.init_trackers("run")
    accelerator.log({"loss": torch.tensor(2.0), "parts": {"a": 1, "b": {"c": 0.5}}}, step=2)
    with pytest.raises(UsageError, match=r"log: 'image': not one number .*get_tracker"):
        accelerator.log({"image": torch.ones(2, 3)})
    accelerator.end_training()
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line).items() >= {"step": 2, "loss": 2.0, "parts/a": 1, "parts/b/c": 0.5}.items()


def test_a_scripts_own_tracker_gets_what_the_script_logs(clean_states, tmp_path):
    class Mine(import_module("shardkit.compat.tracking").GeneralTracker):
        name, requires_logging_directory, said = "mine", False, []

        def log(self, values, step=None, **arguments):
            self.said.append((values, step))

    image = object()
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, log_with=Mine())
    accelerator.init_trackers("run")
    accelerator.log({"loss": 2.0}, step=7)  # counts otherwise than the optimizer: it has done no step
    accelerator.log({"image": image, "size": 3})
    accelerator.end_training()
    assert Mine.said == [({"loss": 2.0}, 7), ({"image": image, "size": 3}, None)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 7, "loss": 2.0}, {"step": 0, "size": 3}]


# ---- attributes that scripts set ----


def test_attributes_that_agree_with_the_run_can_be_set_and_others_are_refused(clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, gradient_accumulation_steps=4)
    accelerator.native_amp = False
    with pytest.raises(UsageError, match=r"native_amp: the mixed precision of this run is no \(got .* True\)"):
        accelerator.native_amp = True
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator._models = [model]
    with pytest.raises(UsageError, match=r"the prepared models cannot be replaced \(got 0 for 1\); free_memory\(\)"):
        accelerator._models = []
    with pytest.raises(UsageError, match=r"step: a window cannot begin in its middle \(got 3 with 4 micro-batches"):
        accelerator.step = 3
    accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert accelerator.scaler is None
    with pytest.raises(UsageError, match=r"scaler: the run has one .* \(got a GradScaler .* no\)"):
        accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerator.device_placement = accelerator.step_scheduler_with_optimizer = False
    assert (accelerator._run.loops.device_placement, accelerator._run.loops.step_scheduler_with_optimizer) == (0, 0)


def test_a_step_of_0_begins_a_window(clean_states):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, gradient_accumulation_steps=3)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    syncs = []
    for number in range(7):
        if number == 2:
            assert accelerator.step == 2
            accelerator.step = 0
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, False, False, False, True, False, False]


def models_in_a_list(kind: str) -> tuple[int, list[float]]:
    accelerator = Accelerator(config={"distributed_type": kind, "use_cpu": True}, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    for number in range(4):
        with accelerator.accumulate([first, second], optimizer, None):
            accelerator.backward(second(first(torch.full((1, 2), float(number)))).sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator._run.counters.step, accelerator.unwrap_model(first).weight.flatten().tolist()


def test_accumulate_takes_models_in_a_list_and_what_is_no_model(ranks):
    alone = ranks.run(1, models_in_a_list, "NO")[0]
    assert alone[0] == 2
    for steps, weight in ranks.run(2, models_in_a_list, "MULTI_CPU"):
        assert (steps, weight) == (2, pytest.approx(alone[1]))


def test_trackers_and_the_project_can_be_chosen_after_the_accelerator(clean_states, tmp_path):
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    assert accelerator.log_with == [] and accelerator.project_dir is None
    accelerator.project_configuration = ProjectConfiguration(project_dir=str(tmp_path))
    accelerator.log_with = ["csv"]
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=1)
    assert [one.name for one in accelerator.trackers] == [*accelerator.log_with, "jsonl"]
    assert (tmp_path / "run" / "metrics.csv").exists()
    with pytest.raises(UsageError, match=r"log_with.*nothing"):
        accelerator.log_with = "nothing"
    with pytest.raises(UsageError, match=r"Accelerator.trackers: not a tracker \(got int\)"):
        accelerator.trackers = [3]
    kept = accelerator.trackers[:1]
    accelerator.trackers = kept
    assert accelerator.trackers == kept


def loops_over_loaders_that_were_taken_out():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True}, gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(9), batch_size=2))
    accelerator._dataloaders.clear()
    taken_out = list(accelerator._dataloaders)
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    accelerator._dataloaders = []
    ends = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None].float()).sum())
            ends.append(accelerator.sync_gradients)
    return taken_out, gathered, ends


def test_a_loop_over_a_loader_that_was_taken_out_ends_windows_and_drops_padding(ranks):
    taken_out, gathered, ends = ranks.run(2, loops_over_loaders_that_were_taken_out)[0]
    assert (taken_out, gathered, ends) == ([], [[0, 1, 2, 3], [4, 5, 6, 7], [8]], [False, True, True])


def test_a_loader_that_skips_batches_has_the_length_of_the_rest(clean_states):
    accelerator = Accelerator(config=ALONE)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(10), batch_size=2))
    rest = accelerator.skip_first_batches(loader, 3)
    assert isinstance(rest, torch.utils.data.DataLoader) and rest.batch_size == 2
    assert accelerator.prepare(rest) is rest and accelerator._dataloaders == [loader]
    assert (len(rest), [batch.tolist() for batch in rest]) == (2, [[6, 7], [8, 9]])
    assert (len(loader), len([*loader])) == (5, 5)
    assert len(accelerator.skip_first_batches(rest, 4)) == 1


def exchanges_as_the_handler_says():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2})
    assert accelerator.ddp_handler is None
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    first = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.ddp_handler.find_unused_parameters = False
    accelerator.ddp_handler.broadcast_buffers = False
    second = accelerator.prepare(torch.nn.Linear(1, 1))
    return [(one.find_unused_parameters, one.broadcast_buffers) for one in (first, second)]


def test_a_ddp_handler_that_is_set_or_changed_later_is_read_by_prepare(ranks):
    assert ranks.run(2, exchanges_as_the_handler_says)[0] == [(True, True), (False, False)]


def notes_of_two_prepares():
    config = {"distributed_type": "FSDP", "use_cpu": True, "num_processes": 2}
    with log_lines() as lines:
        accelerator = Accelerator(config=config, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)])
        accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.prepare(torch.nn.Linear(2, 2))
    return sum("bucket_cap_mb: has no effect" in line for line in lines)


def test_notes_on_a_ddp_handler_are_logged_once(ranks):
    assert ranks.run(2, notes_of_two_prepares)[0] == 1


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11 says so at the first trace
def test_settings_objects_are_attributes_which_can_be_set_or_say_that_they_cannot(clean_states, tmp_path):
    kinds = (AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
    handlers = [kind() for kind in kinds]
    accelerator = Accelerator(config=ALONE, kwargs_handlers=handlers)
    shown = [accelerator.autocast_handler, accelerator.scaler_handler, accelerator.init_handler]
    assert [*shown, accelerator.profile_handler] == handlers and accelerator.ao_recipe_handler is None
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler, accelerator.fp8_backend) == (False, False, "NO")
    with pytest.raises(UsageError, match=r"a GradScalerKwargs is read when the Accelerator is made .*kwargs_handlers="):
        accelerator.scaler_handler = GradScalerKwargs(init_scale=8.0)
    with pytest.raises(UsageError, match="recipes for fp8 are not supported"):
        accelerator.te_recipe_handler = object()
    traced = []
    accelerator.profile_handler.on_trace_ready = traced.append
    with accelerator.profile() as profiler:
        torch.ones(1).sum()
    assert traced == [profiler]
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    with torch.autocast("cpu"), accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(UsageError, match=r"AutocastKwargs\(enabled=...\)"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def splits_batches_as_the_object_says():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True, "num_processes": 2})

    def first_batch():
        return next(iter(accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=4)))).tolist()

    found = [first_batch()]
    accelerator.dataloader_config.split_batches = True
    found.append(first_batch())
    accelerator.dataloader_config = DataLoaderConfiguration(even_batches=False)
    found.append(first_batch())
    return found, accelerator.split_batches, accelerator.even_batches


def test_a_configuration_of_loaders_that_is_changed_later_is_read_by_prepare(ranks):
    found = ranks.run(2, splits_batches_as_the_object_says)
    assert found[0] == ([[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]], False, False)
    assert found[1] == ([[4, 5, 6, 7], [2, 3], [4, 5, 6, 7]], False, False)


def test_other_objects_that_are_changed_later_are_read_when_they_count(clean_states):
    accelerator = Accelerator(config=ALONE)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(5)))
    settings = accelerator.gradient_state.plugin_kwargs
    settings.update({"num_steps": 2})
    settings["sync_with_dataloader"] = False
    assert settings == {"num_steps": 2, "sync_with_dataloader": False} and accelerator.gradient_accumulation_steps == 2
    syncs = []
    for _ in loader:
        with accelerator.accumulate():
            syncs.append(accelerator.sync_gradients)
    assert syncs == [False, True, False, True, False]
    with pytest.raises(UsageError, match="plugin_kwargs: a setting of the run cannot be removed"):
        del settings["num_steps"]
    accelerator.state.dynamo_plugin.backend = DynamoBackend.TVM
    with pytest.raises(UsageError, match="TorchDynamoPlugin: backend: only inductor"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_a_loop_for_schedule_free_optimizers_runs_with_any(clean_states):
    accelerator = Accelerator(config=ALONE)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.train()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.eval()


def trains_under_fsdp_of_an_older_torch():
    from shardkit.sharding.fsdp import shard_model

    found, shard_model.can_reduce_unused = shard_model.can_reduce_unused, lambda: False
    try:
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=10)]
        accelerator = Accelerator(kwargs_handlers=handlers, config={"use_cpu": True, "num_processes": 2})
        with log_lines() as lines:
            model = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        return [line for line in lines if "find_unused_parameters" in line]
    finally:
        shard_model.can_reduce_unused = found


def test_an_older_torch_ignores_find_unused_parameters_under_fsdp_and_says_so(ranks):
    told, _ = ranks.run(2, trains_under_fsdp_of_an_older_torch)
    assert len(told) == 1 and "no effect under FSDP before torch 2.13" in told[0]


def test_a_hook_that_is_removed_leaves_a_forward_that_the_script_set():
    hooks = import_module("shardkit.compat.hooks")
    module = torch.nn.Linear(1, 1)
    module.forward = lambda x: "the script's"
    for append in (False, True):
        hooks.add_hook_to_module(module, hooks.ModelHook(), append)
    assert module(1) == "the script's"
    hooks.remove_hook_from_module(module)
    assert module(1) == "the script's" and "_hf_hook" not in vars(module)
    del module.forward
    hooks.remove_hook_from_module(hooks.add_hook_to_module(module, hooks.ModelHook()))
    assert "forward" not in vars(module)


def test_a_device_placement_that_is_not_one_for_each_is_refused(clean_states):
    accelerator = Accelerator(cpu=True)
    for given, got in (([True], "1 for 2"), (True, "True for 2")):
        with pytest.raises(UsageError, match=rf"needs one value per argument \(got {got}\); write a list"):
            accelerator.prepare(torch.nn.Linear(1, 1), "text", device_placement=given)
    assert accelerator.prepare(torch.nn.Linear(1, 1), "text", device_placement=[True, None])[1] == "text"


def test_prepare_gives_back_what_it_does_not_know(clean_states):
    accelerator = Accelerator(cpu=True)
    model, number, text = accelerator.prepare(torch.nn.Linear(1, 1), 3, "text")
    assert (number, text) == (3, "text") and isinstance(accelerator.unwrap_model(model), torch.nn.Linear)
    assert accelerator.prepare("text") == "text"


def test_a_handler_that_ends_autocast_for_the_whole_run_is_refused():
    with pytest.raises(UsageError, match=r"what a run computes in is its mixed precision \(got False\)"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs()])
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
