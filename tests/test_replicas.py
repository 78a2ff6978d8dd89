"""Weights that several ranks hold alike, and that differ: a save or export has those of rank 0's replica, never a
mix."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardkit import Accelerator
from shardkit.checkpoint.commands import merge
from shardkit.checkpoint.files import manifest
from shardkit.checkpoint.files.verify import Checkpoint
from shardkit.runtime.checkpoints import saving
from tests.ranks import log_lines


def parted(folder, strategy, changed):
    """Rank 1 changes a large and a small weight. Returns what a load and an export gave, and the warnings."""
    with log_lines() as lines:
        kind = "FULL_STATE_DICT" if strategy == "full" else "SHARDED_STATE_DICT"
        accelerator = Accelerator(
            config={"distributed_type": "MULTI_CPU", "use_cpu": True, "fsdp_config": {"fsdp_state_dict_type": kind}}
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 1), nn.Linear(1, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        accelerator.backward(model(torch.ones(2, 600)).square().mean())
        optimizer.step()
        inner = accelerator.unwrap_model(model)
        before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
        with torch.no_grad():
            for name in changed if accelerator.process_index == 1 else ():
                inner.get_parameter(name).add_(1.0)
        for name in ("first", "second"):
            accelerator.save_state(folder / name, blocking=strategy != "async")
        accelerator.save_model(model, folder / "export")
        accelerator.load_state(folder / "second")
        saving.close(accelerator._run)
    for found in (inner.state_dict(), load_file(folder / "export" / "model.safetensors")):
        assert all(torch.equal(found[name], before[name]) for name in before), "a mix"
    return [line for line in lines if "weights differ" in line]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "full", "async"])
def test_weights_that_rank_1_changed_alone_are_saved_as_rank_0_has_them(ranks, tmp_path, strategy):
    told = ranks.run(2, parted, tmp_path, strategy, ["0.weight", "1.bias", "2.weight"])
    assert told[1] == [] and len(told[0]) == 1, "once"
    assert "weights differ between ranks (model: 0.weight, model: 1.bias, model: 2.weight)" in told[0][0]
    assert "those of rank 0's replica are saved" in told[0][0]


def test_nothing_is_said_of_equal_weights(ranks, tmp_path):
    assert ranks.run(2, parted, tmp_path, "sharded", []) == [[], []]


def own_rate(folder, kind):
    with log_lines() as lines:
        accelerator = Accelerator(config={"distributed_type": kind, "use_cpu": True})
        model = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(2):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + accelerator.process_index)
            accelerator.save_state(folder / str(step))
        saving.close(accelerator._run)
    return [line for line in lines if "differ between ranks" in line]


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_CPU"])
def test_a_save_says_once_that_learning_rates_differ(ranks, tmp_path, kind):
    told = ranks.run(2, own_rate, tmp_path, kind)
    assert told[1] == [] and len(told[0]) == 1
    assert "settings differ between ranks (optim.param_groups[0])" in told[0][0]


def large():
    """A model with tensors of more than 1 MiB a shard, which several ranks write, and of less."""
    return nn.Sequential(nn.Linear(900, 1200), nn.Linear(1200, 3), nn.Linear(3, 1))


def parted_replicas(folder, kind, changed, blocking):
    """Two replicas of two shards; ranks 2 and 3 change weights and a state of the optimizer. Returns the warnings."""
    with log_lines() as lines:
        accelerator = Accelerator(
            config={
                "distributed_type": "FSDP",
                "use_cpu": True,
                "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD", "fsdp_state_dict_type": kind},
                "shardkit": {"mesh": {"replicate_size": 2, "shard_size": 2}},
            }
        )
        torch.manual_seed(0)
        model = large()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        accelerator.backward(model(torch.ones(2, 900)).square().mean())
        optimizer.step()
        parameters = dict(model.named_parameters())
        values = {name: held.full_tensor().detach().clone() for name, held in parameters.items()}
        momenta = {name: optimizer.state[held]["exp_avg"].full_tensor() for name, held in parameters.items()}
        with torch.no_grad():
            for name in changed if accelerator.process_index >= 2 else ():
                parameters[name].to_local().add_(1.0)
                optimizer.state[parameters[name]]["exp_avg"].to_local().add_(1.0)
        for name in ("first", "second", "second"):
            accelerator.save_state(folder / name, blocking=blocking)
        accelerator.save_model(model, folder / "export")
        accelerator.load_state(folder / "second")
        saving.close(accelerator._run)
    found = {name: held.full_tensor() for name, held in parameters.items()}
    for there in (found, load_file(folder / "export" / "model.safetensors")):
        assert all(torch.equal(there[name], values[name]) for name in values), "a mix"
    for name, held in parameters.items():
        assert torch.equal(optimizer.state[held]["exp_avg"].full_tensor(), momenta[name]), "a mix"
    return [line for line in lines if "differ" in line]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "blocking"),
    [
        ("SHARDED_STATE_DICT", False),
        ("SHARDED_STATE_DICT", True),
        ("FULL_STATE_DICT", True),
    ],
)
def test_weights_that_a_second_replica_changed_alone_are_saved_as_the_first_has_them(ranks, tmp_path, kind, blocking):
    told = ranks.run(4, parted_replicas, tmp_path, kind, ["0.weight", "1.bias", "2.weight"], blocking)
    assert told[1:] == [[], [], []] and len(told[0]) == 1, "once"
    assert "model: 0.weight, model: 1.bias, model: 2.weight, optim: 0.weight/exp_avg" in told[0][0]
    assert "those of rank 0's replica are saved" in told[0][0]
    saved = tmp_path / "second"
    merge.merge(Checkpoint(saved, manifest.read(saved)), tmp_path / "merged")
    merged, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "export"))
    assert all(torch.equal(merged[name], exported[name]) for name in exported)
    for world_size in (2, 3):
        assert all(ranks.run(world_size, loads, saved, tmp_path / "export")), f"on {world_size} ranks"


def loads(saved, export):
    """Whether all weights that this rank loads are those of the export."""
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True})
    model = large()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.load_state(saved)
    exported = load_file(export / "model.safetensors")
    return all(torch.equal(held.full_tensor(), exported[name]) for name, held in model.named_parameters())


@pytest.mark.slow
def test_nothing_is_said_of_equal_replicas(ranks, tmp_path):
    assert ranks.run(4, parted_replicas, tmp_path, "SHARDED_STATE_DICT", [], True) == [[], [], [], []]
