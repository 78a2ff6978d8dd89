"""What each rank has in a registered object is what it gets back, with the tensors in it."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shardkit.checkpoint.commands import compare
from shardkit.checkpoint.files import manifest, verify
from shardkit.checkpoint.states.fill import Saved
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.runtime.checkpoints import saving
from tests import checkpoints
from tests.numbered_runs import run_of, train


class Meter:
    """Values and tensors, their shapes too, that depend on the rank."""

    def __init__(self):
        self.state = {}

    def fill(self, rank, equal=False):
        size = 3 if equal else 3 + rank
        self.state = {
            "count": 10 if equal else 10 + rank,
            "nested": [{"buffer": torch.arange(size) + (0 if equal else rank)}, (1, None)],
            "half": torch.full((2,), 0.5 if equal else 0.5 + rank, dtype=torch.bfloat16),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def shown(meter):
    state = meter.state
    return [state["count"], state["nested"][0]["buffer"].tolist(), state["nested"][1], state["half"].tolist()]


def expected(rank):
    meter = Meter()
    meter.fill(rank)
    return shown(meter)


def metered(project, registered=lambda rank: True, **settings):
    run, meter = run_of(project, **settings), Meter()
    meter.fill(run[0].process_index)
    if registered(run[0].process_index):
        run[0].register_for_checkpointing(meter)
    return run, meter


def save_meters(project, kind, blocking=True, equal=False):
    run, meter = metered(project)
    if equal:
        meter.fill(run[0].process_index, equal=True)
    train(run, 1)
    run[0].state.fsdp_plugin.set_state_dict_type(kind)
    path = run[0].save_state(blocking=blocking)
    meter.fill(7)  # what is saved beside training is what was
    saving.close(run[0]._run)
    return path


def load_meters(project, lines=None):
    run, meter = metered(project)
    meter.fill(9)
    run[0].load_state()
    saving.close(run[0]._run)
    return shown(meter)


KINDS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_own_back(ranks, tmp_path, kind, blocking):
    (path, _, _) = ranks.run(3, save_meters, tmp_path, kind, blocking)
    assert ranks.run(3, load_meters, tmp_path) == [expected(rank) for rank in range(3)]
    assert json.loads((path / "state/common.json").read_text())["apart"] == [["objects", "registered.0"]]
    found = load_file(path / "own/r00002-of-00003.safetensors")
    assert found["objects:registered.0.nested[0].buffer"].tolist() == [2, 3, 4, 5, 6]
    assert manifest.read(path).version == 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_on_other_ranks_all_get_rank_0s_with_a_warning(ranks, alone, tmp_path, world, caplog):
    ranks.run(3, save_meters, tmp_path, KINDS[0])
    assert ranks.run(world, load_meters, tmp_path) == [expected(0)] * world
    if world == 1:
        caplog.set_level("WARNING", "shardkit")
        load_meters(tmp_path)
        assert "registered.0: each rank saved a different value; since the number of ranks" in caplog.text


def test_what_is_equal_is_shared_and_looks_as_before(ranks, alone, tmp_path, caplog):
    (path, _) = ranks.run(2, save_meters, tmp_path, KINDS[0], True, True)
    assert not (path / "own").exists() and manifest.read(path).version == 1
    common, own = (json.loads((path / f"state/{name}.json").read_text()) for name in ("common", "rank-00001"))
    assert set(common) == {"optimizers", "objects", "loaders", "seed", "classes"}
    assert set(own) == {"loaders", "rng", "classes"}
    caplog.set_level("WARNING", "shardkit")
    load_meters(tmp_path)
    assert "had its own" not in caplog.text


def on_some_ranks(project, registered):
    run, meter = metered(project, registered)
    run[0].save_state()
    meter.fill(9)
    run[0].load_state()
    saving.close(run[0]._run)
    return shown(meter)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_object_registered_on_one_rank_only_is_that_ranks(ranks, tmp_path, rank):
    found = ranks.run(2, on_some_ranks, tmp_path, {0: is_first, 1: is_second}[rank])
    assert found[rank] == expected(rank) and found[1 - rank] == expected(9)


def is_first(rank):
    return rank == 0


def is_second(rank):
    return rank == 1


def drifting_rates(project):
    """A scheduler that each rank fed with its own loss: rates differ, and stay so over a resume."""
    run = run_of(project)
    for group in run[2].param_groups:
        group["lr"] = 0.25 / (1 + run[0].process_index)
    run[0].save_state()
    for group in run[2].param_groups:
        group["lr"] = 0.0
    run[0].load_state()
    saving.close(run[0]._run)
    return [group["lr"] for group in run[2].param_groups]


def test_settings_that_differ_come_back_to_their_ranks(ranks, tmp_path):
    assert ranks.run(2, drifting_rates, tmp_path) == [[0.25], [0.125]]


@pytest.fixture
def saved(ranks, tmp_path):
    (path, _) = ranks.run(2, save_meters, tmp_path / "run", KINDS[0])
    return path


def test_the_commands_know_each_ranks_own(saved, tmp_path, capsys):
    from tests.test_cli_checkpoint import called

    assert "per rank  registered.0: different on each rank, 2 files of" in called(capsys, "inspect", saved)
    facts = json.loads(called(capsys, "inspect", saved, "--json"))
    assert facts["own"] == {"of": ["registered.0"], "files": 2, "bytes": facts["own"]["bytes"]}
    assert "valid" in called(capsys, "verify", saved)
    other = tmp_path / "other"
    shutil.copytree(saved, other)
    assert compare.compare(verify.open_checkpoint(saved), verify.open_checkpoint(other)).same_state
    called(capsys, "merge", saved, "-o", tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").exists()


def test_a_difference_in_a_ranks_own_is_a_difference(ranks, tmp_path):
    paths = [ranks.run(2, save_as, tmp_path / name, count)[0] for name, count in (("a", 1), ("b", 2))]
    found = compare.compare(*(verify.open_checkpoint(path) for path in paths))
    assert not found.same_state and found.other_state == ["rank 1: registered.0"]


def save_as(project, count):
    run, meter = metered(project)
    meter.fill(dist.get_rank())
    if dist.get_rank() == 1:
        meter.state["half"] += count
    path = run[0].save_state()
    saving.close(run[0]._run)
    return path


def test_damage_in_a_ranks_own_is_found_before_anything_changes(ranks, saved, tmp_path):
    victim = saved / "own/r00001-of-00002.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    (problem,) = verify.damages(verify.open_checkpoint(saved))
    assert "own/r00001-of-00002.safetensors: its xxh3 digest differs" in problem
    told = ranks.run(2, refused, saved)
    assert told[0] == told[1] and "own/r00001-of-00002.safetensors" in told[0]
    victim.unlink()
    told = ranks.run(2, refused, saved)
    assert "own/r00001-of-00002.safetensors: missing" in told[0]


def refused(path):
    run, meter = metered(path.parent / "again")
    meter.fill(9)
    weights = [parameter.to_local().clone() for parameter in run[1].parameters()]
    with pytest.raises(CheckpointError) as caught:
        run[0].load_state(path)
    assert shown(meter) == expected(9)
    assert all(torch.equal(p.to_local(), w) for p, w in zip(run[1].parameters(), weights, strict=True))
    return str(caught.value)


def test_a_reader_of_version_1_refuses_it_with_words(saved, monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", 1)
    with pytest.raises(CheckpointError, match=r"format version 2 is newer than this shardkit supports \(1\); upgrade"):
        manifest.read(saved)


def both(folder):
    """A sharded tensor in an object whose values differ: the tensor is shared, each rank keeps the rest."""
    live = checkpoints.build("fsdp")
    counter = live.objects["registered.0"]
    weight = live.models[0].blocks[0].up.weight
    counter.value = {"ema": weight.detach().clone(), "rank": dist.get_rank()}
    full = weight.full_tensor().clone()
    checkpoints.save(live, folder)
    counter.value = {"ema": torch.zeros_like(weight), "rank": -1}
    checkpoints.load(live, folder)
    ema = counter.value["ema"]
    return counter.value["rank"], ema.placements == weight.placements, torch.equal(ema.full_tensor(), full)


def test_sharded_tensors_in_such_an_object_stay_sharded(ranks, tmp_path):
    assert ranks.run(2, both, tmp_path / "c") == [(0, True, True), (1, True, True)]


def test_a_reference_to_a_tensor_that_is_not_there_is_damage(saved):
    with verify.Files(verify.open_checkpoint(saved)) as files, pytest.raises(CheckpointCorrupted, match="is missing"):
        Saved(files, 0).new("objects", "nowhere")
