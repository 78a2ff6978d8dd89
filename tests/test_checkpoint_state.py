"""Save on some ranks, load on others: the same weights, optimizer, schedule, objects, and the same next losses."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from shardkit.checkpoint.files import manifest
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.states import state
from shardkit.distributed import control
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
    checkpoints.load(live, folder)
    digest = checkpoints.digest_of(live)
    counter = live.objects["registered.0"].value
    assert counter["pair"] == (1, float("inf")) and counter["count"] == 2 and counter["weights"].tolist() == [0, 0, 0]
    assert live.models[0].state_dict()
    return digest, checkpoints.train(live, 3, first=3)


@pytest.mark.requirement("A5")
@pytest.mark.fault_row(19)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_on_the_same_ranks_the_run_goes_on_bit_equal(ranks, tmp_path, kind, strategy):
    saved = ranks.run(2, save_and_go_on, tmp_path / "c", kind, strategy, True)
    loaded = ranks.run(2, load_and_go_on, tmp_path / "c", strategy, True)
    assert loaded == saved


PAIRS = [
    (2, "fsdp", 1, "plain"),
    (1, "plain", 3, "fsdp"),
    (3, "ddp", 2, "fsdp"),
    pytest.param(4, "hybrid", 2, "ddp", marks=pytest.mark.slow),
    pytest.param(2, "fsdp", 4, "hybrid", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.requirement("D4")
@pytest.mark.fault_row(17)
@pytest.mark.fault_row(18)
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(("saving", "before", "loading", "after"), PAIRS)
def test_on_other_ranks_and_strategies_everything_is_equal(ranks, tmp_path, saving, before, loading, after, kind):
    saved = ranks.run(saving, save_and_go_on, tmp_path / "c", kind, before, False)
    loaded = ranks.run(loading, load_and_go_on, tmp_path / "c", after, False)
    assert {digest for digest, _ in loaded} == {saved[0][0]}
    mean = torch.tensor([losses for _, losses in saved]).mean(0)
    again = torch.tensor([losses for _, losses in loaded]).mean(0)
    torch.testing.assert_close(again, mean, rtol=1e-5, atol=1e-6)


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

    from shardkit.checkpoint.states.state import Live

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
    from shardkit.checkpoint.states.state import Live

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
    state_of = live.objects["registered.0"].value
    for value, text in (
        ({"inner": print}, r"registered.0.callback\[1\].inner: a value of type builtins.built"),
        (
            torch.ones(2, device="meta"),
            r"registered.0.callback\[1\]: has no values \(got a tensor on the meta",
        ),
        (state_of, r"registered.0: contains itself, or is nested too deeply"),
    ):
        state_of["callback"] = [1, value]
        with pytest.raises(CheckpointError, match=text):
            checkpoints.save(live, folder)
        assert not folder.exists()


def test_an_object_that_cannot_be_stored_is_named(ranks, tmp_path):
    ranks.run(1, refuse_a_state_that_is_not_plain, tmp_path / "c")


REFUSED = "nothing was changed:\n  registered.0: load_state_dict refuses the saved state: ValueError: no thanks"


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
    with pytest.raises(CheckpointError, match=REFUSED):
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


def average_again(folder, saves, kind="fsdp"):
    """An average of the weights that is made at its first update, and loaded before that; whether it is right."""
    live = checkpoints.build(kind)
    checkpoints.train(live, 2)
    weights = {name.removeprefix("module."): one for name, one in live.models[0].named_parameters()}
    average = live.objects["registered.0"]
    if saves:
        average.value["average"] = {name: one.detach().clone() for name, one in weights.items()}
        checkpoints.save(live, folder)
        return True
    checkpoints.load(live, folder)
    return all(torch.equal(average.value["average"][name].lerp_(one, 0.5), one) for name, one in weights.items())


@pytest.mark.slow
def test_an_average_of_sharded_weights_that_is_not_made_yet_is_sharded(ranks, tmp_path):
    for size, saves in ((2, True), (2, False), (3, False)):
        assert ranks.run(size, average_again, tmp_path / "c", saves) == [True] * size
    for kind, saves in (("ddp", True), ("fsdp", False)):  # saved whole, as all weights were
        assert ranks.run(2, average_again, tmp_path / "whole", saves, kind) == [True] * 2


def test_a_state_that_still_has_its_graph_is_replaced(tmp_path):
    """As the smallest loss so far, which a script forgot to detach."""
    live = checkpoints.build("plain")
    live.objects["registered.0"].value["best"] = live.models[0].scale.sum() * 0 + 5
    checkpoints.save(live, tmp_path / "c")
    live.models[0].scale.requires_grad_(True)
    live.objects["registered.0"].value["best"] = live.models[0].scale.sum()
    assert live.objects["registered.0"].value["best"].grad_fn is not None
    checkpoints.load(live, tmp_path / "c")
    assert live.objects["registered.0"].value["best"] == 5


def differ_in_step(folder):
    import torch.distributed as dist

    live = checkpoints.build("fsdp")
    with pytest.raises(CheckpointSaveError, match=r"do not save the same step: 0 on rank 0 .*, 1 on rank 1"):
        checkpoints.save(live, folder, step=dist.get_rank())
    return [path.name for path in folder.parent.iterdir()]


def differ_in_a_model(folder):
    import torch.distributed as dist

    live = state.Live([torch.nn.Linear(3 + dist.get_rank(), 2)])
    with pytest.raises(CheckpointSaveError, match=r"model: the tensors on rank 1 .* differ from those on rank 0 "):
        checkpoints.save(live, folder)
    return [path.name for path in folder.parent.iterdir()]


def test_ranks_must_save_the_same_tensors(ranks, tmp_path):
    assert ranks.run(2, differ_in_a_model, tmp_path / "c") == [[], []]


def test_ranks_must_save_the_same_step(ranks, tmp_path):
    assert ranks.run(2, differ_in_step, tmp_path / "c") == [[], []]


def columns(seed, rows):
    """A model whose parameters are split on dim 1, and one whose are split on dim 0."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch.manual_seed(seed)
    model = torch.nn.Linear(300, rows, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))


def save_columns(folder, kind, digest):
    from shardkit.checkpoint.states.state import Live

    model = columns(1, 40)
    checkpoints.save(Live([model]), folder, kind=kind, digest=digest)
    return model.weight.full_tensor().tolist()


def load_columns(folder, seed):
    from shardkit.checkpoint.states.state import Live

    models = columns(seed, 40), torch.nn.Linear(300, 40, bias=False)
    for model in models:
        checkpoints.load(Live([model]), folder)
    return models[0].weight.full_tensor().tolist(), models[1].weight.tolist()


@pytest.mark.parametrize(("kind", "digest"), [("sharded", "sha256"), ("full", "sha256"), ("full", "xxh3")])
def test_any_dim_may_be_split_and_either_digest_guards(ranks, tmp_path, kind, digest):
    (expected, _) = ranks.run(2, save_columns, tmp_path / "c", kind, digest)
    assert manifest.read(tmp_path / "c").digest == digest
    for size in (2, 3):
        for found in ranks.run(size, load_columns, tmp_path / "c", 9):
            assert found == (expected, expected)


def several(folder):
    """Two models, an optimizer over both and one of its own, nested and plain optimizer state, a scaler."""
    from shardkit.checkpoint.states.state import Live

    def build_several(seed):
        torch.manual_seed(seed)
        first, second = checkpoints.build("fsdp", seed).models[0], torch.nn.Linear(3, 3)
        both = torch.optim.SGD(
            [*(p for p in first.parameters() if p.requires_grad), *second.parameters()], momentum=0.9
        )
        own = torch.optim.Adagrad(second.parameters())
        own.state[second.bias] |= {"count": 3, "nested": {"kept": (torch.full((3,), float(seed)), "text")}}
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
        return Live([first, second], [both, own], {"scaler": scaler, "counter": checkpoints.Counter()})

    saved = build_several(3)
    for model, shape in ((saved.models[0], (2, 5)), (saved.models[1], (2, 3))):
        inputs = torch.zeros(shape, dtype=torch.int64) if len(shape) == 2 and shape[1] == 5 else torch.ones(shape)
        model(inputs).sum().backward()
    for optimizer in saved.optimizers:
        optimizer.step()
    checkpoints.save(saved, folder)
    loaded = build_several(4)
    checkpoints.load(loaded, folder)
    assert loaded.objects["scaler"].state_dict()["scale"] == 8.0
    rows = [live.optimizers[1].state[live.models[1].bias] for live in (saved, loaded)]
    assert rows[1]["count"] == 3 and rows[1]["nested"]["kept"][1] == "text"
    assert rows[1]["nested"]["kept"][0].tolist() == [3.0] * 3
    assert torch.equal(rows[0]["sum"], rows[1]["sum"])
    momentum = [live.optimizers[0].state[live.models[1].weight]["momentum_buffer"] for live in (saved, loaded)]
    assert torch.equal(*momentum)
    assert checkpoints.digest_of(saved) == checkpoints.digest_of(loaded)
    without = build_several(5)
    del without.objects["scaler"]
    checkpoints.load(without, folder)


def test_several_models_and_optimizers(ranks, tmp_path):
    ranks.run(2, several, tmp_path / "c")
    assert {path.name for path in (tmp_path / "c").iterdir()} >= {"model", "model_1", "optim", "optim_1"}


def messages_of(layers, path, differs=False):
    """What this rank tells rank 0 in one save of a model of so many layers, a text each."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if differs and dist.is_initialized():
        for row in optimizer.state.values():
            row["scales"] = torch.full((2 + dist.get_rank(),), float(dist.get_rank()))
            row["count"] = dist.get_rank()
    told, agreed = [], control.start(60.0)
    real = agreed.collect

    def collect(value):
        told.append(json.dumps(value))
        return real(value)

    agreed.collect = collect
    write.save(state.Live([model], [optimizer]), "sharded", write.SaveRequest(path, 1, "test"), agreed)
    return told


def test_what_ranks_tell_one_another_does_not_grow_with_the_tensors(tmp_path):
    few, many = messages_of(1, tmp_path / "few"), messages_of(100, tmp_path / "many")
    assert [len(text) for text in many] == pytest.approx([len(text) for text in few], abs=20), "sizes have more digits"


@pytest.mark.parametrize(("differs", "agreements"), [(False, 2), (True, 4)])
def test_a_save_takes_two_agreements_and_small_messages(ranks, tmp_path, differs, agreements):
    """Each fits the one packet of an agreement; two more where ranks hold something differently."""
    for layers in (1, 30):
        for told in ranks.run(2, messages_of, layers, tmp_path / str(layers), differs):
            assert len(told) == agreements and max(map(len, told)) < control.PACKET_BYTES - 8
