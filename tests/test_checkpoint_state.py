"""Save on some ranks, load on others: the same weights, optimizer, schedule, objects, and the same next losses."""

import json

import pytest
import torch
from safetensors.torch import load_file

from shardkit.checkpoint import manifest
from shardkit.errors import CheckpointError, CheckpointSaveError
from tests import checkpoints


def save_and_go_on(folder, kind, strategy, with_dropout):
    live = checkpoints.build(strategy)
    if not with_dropout:
        checkpoints.dropout_off(live)
    checkpoints.train(live, 3)
    digest = checkpoints.digest_of(live)
    checkpoints.save(live, folder, step=3, kind=kind, config_text="seed: 7\n")
    assert checkpoints.digest_of(live) == digest, "saving changed the state"
    return digest, checkpoints.train(live, 3, first=3)


def load_and_go_on(folder, strategy, with_dropout):
    live = checkpoints.build(strategy, seed=99)
    if not with_dropout:
        checkpoints.dropout_off(live)
    loaded = checkpoints.load(live, folder)
    digest = checkpoints.digest_of(live)
    counter = live.objects["registered.0"].value
    assert counter["pair"] == (1, float("inf")) and counter["count"] == 2 and counter["weights"].tolist() == [0, 0, 0]
    assert live.models[0].state_dict()
    return digest, checkpoints.train(live, 3, first=3), loaded.random_is_exact


@pytest.mark.requirement("A5")
@pytest.mark.fault_row(19)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_on_the_same_ranks_the_run_goes_on_bit_equal(ranks, tmp_path, kind, strategy):
    saved = ranks.run(2, save_and_go_on, tmp_path / "c", kind, strategy, True)
    loaded = ranks.run(2, load_and_go_on, tmp_path / "c", strategy, True)
    assert [item[:2] for item in loaded] == saved
    assert all(exact for *_, exact in loaded)


PAIRS = [
    (2, "fsdp", 1, "plain"),
    (1, "plain", 3, "fsdp"),
    (3, "ddp", 2, "fsdp"),
    (4, "hybrid", 2, "ddp"),
    (2, "fsdp", 4, "hybrid"),
]


@pytest.mark.requirement("D4")
@pytest.mark.fault_row(17)
@pytest.mark.fault_row(18)
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(("saving", "before", "loading", "after"), PAIRS)
def test_on_other_ranks_and_strategies_everything_is_equal(ranks, tmp_path, saving, before, loading, after, kind):
    saved = ranks.run(saving, save_and_go_on, tmp_path / "c", kind, before, False)
    loaded = ranks.run(loading, load_and_go_on, tmp_path / "c", after, False)
    assert {digest for digest, *_ in loaded} == {saved[0][0]}
    mean = torch.tensor([losses for _, losses in saved]).mean(0)
    again = torch.tensor([losses for _, losses, _ in loaded]).mean(0)
    torch.testing.assert_close(again, mean, rtol=1e-5, atol=1e-6)
    assert not any(exact for *_, exact in loaded)


def test_a_full_checkpoint_opens_with_plain_safetensors(ranks, tmp_path):
    ranks.run(2, save_and_go_on, tmp_path / "c", "full", "fsdp", False)
    found = load_file(tmp_path / "c/model/model.safetensors")
    expected = {name: t for name, t in checkpoints.Net().state_dict().items() if name != "head.weight"}
    assert {name: tuple(t.shape) for name, t in found.items()} == {n: tuple(t.shape) for n, t in expected.items()}
    index = json.loads((tmp_path / "c/index.json").read_text())
    assert index["aliases"]["model"] == {"head.weight": "embed.weight"}
    files = {path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file()}
    assert files == {".json", ".yaml", ".safetensors"}


def test_copies_are_written_once_and_shared_out(ranks, tmp_path):
    ranks.run(2, save_large_copies, tmp_path / "c")
    record = manifest.read(tmp_path / "c")
    sizes = [file.bytes for name, file in record.files.items() if name.startswith("model/")]
    assert len(sizes) == 2 and max(sizes) - min(sizes) < 200_000
    assert sum(sizes) < 1.1 * (1000 * 1100 * 4)


def save_large_copies(folder):
    from torch import nn

    from shardkit.checkpoint.state import Live

    checkpoints.save(Live([nn.parallel.DistributedDataParallel(nn.Linear(1100, 1000))]), folder)


class Different(checkpoints.Net):
    def __init__(self, change):
        super().__init__()
        match change:
            case "missing":
                self.extra = torch.nn.Parameter(torch.zeros(3))
            case "unexpected":
                del self.scale
            case "shape":
                self.scale = torch.nn.Parameter(torch.ones(2, 6))
            case "dtype":
                self.scale = torch.nn.Parameter(torch.ones(1, 6, dtype=torch.bfloat16))


def refuse_what_does_not_fit(folder):
    from shardkit.checkpoint.state import Live

    checkpoints.save(checkpoints.build("plain"), folder)
    for change, text in {
        "missing": "in the model, not in the checkpoint: extra",
        "unexpected": "in the checkpoint, not in the model: scale",
        "shape": r"scale: shape \[1, 6\] in the checkpoint, \[2, 6\] in the model",
        "dtype": "scale: dtype F32 in the checkpoint, BF16 in the model",
    }.items():
        model = Different(change)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        live = Live([model], objects=checkpoints.build("plain").objects)
        with pytest.raises(CheckpointError, match=text):
            checkpoints.load(live, folder)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        if change in ("missing", "unexpected"):
            checkpoints.load(live, folder, strict=False)


@pytest.mark.fault_row(22)
def test_a_model_that_does_not_fit_is_refused_untouched(ranks, tmp_path):
    ranks.run(1, refuse_what_does_not_fit, tmp_path / "c")


def refuse_a_state_that_is_not_plain(folder):
    live = checkpoints.build("plain")
    live.objects["registered.0"].value["callback"] = [1, {"inner": print}]
    with pytest.raises(CheckpointError, match=r"registered.0.callback\[1\].inner: a builtins.builtin_function"):
        checkpoints.save(live, folder)
    assert not folder.exists()


def test_an_object_that_cannot_be_stored_is_named(ranks, tmp_path):
    ranks.run(1, refuse_a_state_that_is_not_plain, tmp_path / "c")


def refuse_halfway(folder):
    """A registered object refuses its state on one rank only: nothing is applied on any."""
    import torch.distributed as dist

    live = checkpoints.build("fsdp")
    checkpoints.train(live, 2)
    checkpoints.save(live, folder)
    checkpoints.train(live, 1, first=2)
    before, rate = checkpoints.digest_of(live), live.objects["scheduler.0"].last_epoch
    if dist.get_rank() == 1:
        live.objects["registered.0"].load_state_dict = refuse_once(live.objects["registered.0"])
    with pytest.raises(CheckpointError, match="nothing was changed:\n  ValueError: no thanks"):
        checkpoints.load(live, folder)
    assert checkpoints.digest_of(live) == before
    assert live.objects["scheduler.0"].last_epoch == rate
    assert live.objects["registered.0"].value["count"] == 2


def refuse_once(counter):
    def load_state_dict(value):
        if value["count"] != counter.value["count"]:
            raise ValueError("no thanks")

    return load_state_dict


def test_all_or_nothing_reaches_the_live_objects(ranks, tmp_path):
    ranks.run(2, refuse_halfway, tmp_path / "c")


def differ_in_step(folder):
    import torch.distributed as dist

    live = checkpoints.build("fsdp")
    with pytest.raises(CheckpointSaveError, match=r"do not save the same step: 0 on rank 0 .*, 1 on rank 1"):
        checkpoints.save(live, folder, step=dist.get_rank())
    return [path.name for path in folder.parent.iterdir()]


def test_ranks_must_save_the_same_step(ranks, tmp_path):
    assert ranks.run(2, differ_in_step, tmp_path / "c") == [[], []]
