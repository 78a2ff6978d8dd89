"""State that a model's own code saves and loads: extra state, state dict hooks, overridden methods."""

import io
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardkit.checkpoint.exporting import save_model
from shardkit.checkpoint.files import manifest
from shardkit.checkpoint.states.state import Live, whole_tensors
from shardkit.cli.main import run
from shardkit.distributed import control
from shardkit.errors import CheckpointError, CheckpointSaveError, StateIncomplete
from shardkit.sharding import weight_files
from tests import checkpoints


class Net(nn.Module):
    """Counts its forwards in an attribute."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.count = 0

    def forward(self, inputs):
        self.count += 1
        return self.layer(inputs) * self.count


class ExtraTensor(Net):
    """The tensor has another size each time."""

    def get_extra_state(self):
        return torch.ones(self.count, dtype=torch.uint8)

    def set_extra_state(self, state):
        self.count = len(state)


class ExtraValues(Net):
    def get_extra_state(self):
        return {"count": self.count, "seen": {1, 2}, "mean": torch.tensor(float(self.count))} if self.count else None

    def set_extra_state(self, state):
        self.count = state["count"]
        assert state["seen"] == {1, 2} and state["mean"].item() == self.count


class OwnMethods(Net):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor(self.count)

    def _load_from_state_dict(self, state, prefix, *args):
        self.count = state.pop(f"{prefix}count").item()
        super()._load_from_state_dict(state, prefix, *args)


class PostHook(Net):
    """What is computed from the weights is computed again when they are loaded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros((), dtype=torch.int64))
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "count", module.kept.item()))

    def forward(self, inputs):
        self.kept += 1
        return super().forward(inputs)


class OtherForm(Net):
    """The state dict has the weights under another name, transposed."""

    def __init__(self):
        super().__init__()
        self.register_state_dict_post_hook(self.change)
        self.register_load_state_dict_pre_hook(self.change_back)

    @staticmethod
    def change(module, state, prefix, _):
        state[f"{prefix}kernel"] = state.pop(f"{prefix}layer.weight").t().clone() + module.count

    @staticmethod
    def change_back(module, state, prefix, *_):
        kernel = state.pop(f"{prefix}kernel")
        module.count = 3  # what is loaded below was saved after three forwards
        state[f"{prefix}layer.weight"] = (kernel - module.count).t()


KINDS = [ExtraTensor, ExtraValues, OwnMethods, PostHook, OtherForm]


def trained(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), kind())
    for _ in range(3):
        model(torch.ones(1, 4))
    return model


@pytest.mark.parametrize("way", ["sharded", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_calls_the_models_own_code(tmp_path, kind, way):
    model = trained(kind)
    checkpoints.save(Live([model]), tmp_path / "c", kind=way)
    torch.manual_seed(1)
    found = nn.Sequential(nn.Linear(4, 3), kind())
    checkpoints.load(Live([found]), tmp_path / "c")
    inputs = torch.randn(5, 4)
    torch.testing.assert_close(found(inputs), model(inputs))
    assert found[1].count == 4


class OwnStateDict(Net):
    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {"count": torch.tensor(self.count)}

    def load_state_dict(self, state, strict=True, assign=False):
        self.count = state["count"].item()
        return super().load_state_dict({k: v for k, v in state.items() if k != "count"}, strict, assign)


def test_the_methods_of_the_whole_model(tmp_path):
    model, found = OwnStateDict(), OwnStateDict()
    model.count = 3
    checkpoints.save(Live([model]), tmp_path / "c")
    checkpoints.load(Live([found]), tmp_path / "c")
    assert found.count == 3 and torch.equal(found.layer.weight, model.layer.weight)


def test_a_merge_says_which_values_it_leaves_out(tmp_path, capsys):
    models = [trained(ExtraValues), trained(ExtraTensor)]
    checkpoints.save(Live(models), tmp_path / "c")
    assert run(["checkpoint", "merge", str(tmp_path / "c"), "-o", str(tmp_path / "m"), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["written"][0]["files"] == ["model.safetensors"]
    assert "note: extra state that is no tensor was not exported (got model: 1._extra_state).\n" in told.err
    assert load_file(tmp_path / "m/model_1/model.safetensors")["1._extra_state"].tolist() == [1, 1, 1]


def save_on_ranks(folder, kind, way):
    from torch.distributed.fsdp import fully_shard

    model = trained(kind)
    fully_shard(model)
    checkpoints.save(Live([model]), folder, kind=way)


def load_on_ranks(folder, kind):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), kind())
    fully_shard(model)
    checkpoints.load(Live([model]), folder)
    return model[1].count, whole_tensors(model)


@pytest.mark.parametrize("kind", [ExtraValues, OwnMethods])
def test_on_other_numbers_of_ranks(ranks, tmp_path, kind):
    ranks.run(2, save_on_ranks, tmp_path / "c", kind, "sharded")
    expected = trained(kind).state_dict()
    for count, found in ranks.run(3, load_on_ranks, tmp_path / "c", kind)[:1]:
        assert count == 3 and found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items() if torch.is_tensor(value))


def test_what_the_checkpoint_lacks_is_named(tmp_path):
    checkpoints.save(Live([trained(Net)]), tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"in the model, not in the checkpoint: 1\._extra_state"):
        checkpoints.load(Live([trained(ExtraValues)]), tmp_path / "c")
    model = trained(ExtraValues)
    checkpoints.load(Live([model]), tmp_path / "c", strict=False)
    checkpoints.save(Live([model]), tmp_path / "d")
    with pytest.raises(CheckpointError, match=r"in the checkpoint, not in the model: 1\._extra_state"):
        checkpoints.load(Live([trained(Net)]), tmp_path / "d")


class SavesOnly(OwnMethods):
    _load_from_state_dict = nn.Module._load_from_state_dict


def test_a_tensor_that_the_model_does_not_load_is_not_dropped_in_silence(tmp_path):
    checkpoints.save(Live([trained(SavesOnly)]), tmp_path / "c")
    checkpoints.load(Live([trained(SavesOnly)]), tmp_path / "c")
    changed = nn.Sequential(nn.Linear(4, 3), SavesOnly())
    with pytest.raises(StateIncomplete, match=r"load_state_dict does not take 1\.count, .* strict=False"):
        checkpoints.load(Live([changed]), tmp_path / "c")
    checkpoints.load(Live([changed]), tmp_path / "c", strict=False)


class ExtraFile(Net):
    def get_extra_state(self):
        return io.BytesIO(b"1")

    def set_extra_state(self, state): ...


def test_extra_state_of_another_kind_is_refused_by_its_place(tmp_path):
    with pytest.raises(CheckpointSaveError, match=r"model\.extra_state\.1\._extra_state: .*_io\.BytesIO cannot be "):
        checkpoints.save(Live([trained(ExtraFile)]), tmp_path / "c")


def test_an_export_says_what_it_leaves_out(tmp_path, caplog):
    save_model.save(trained(ExtraValues), tmp_path / "e", control.start())
    assert "extra state that is no tensor is not exported: 1._extra_state." in caplog.text
    assert "1.layer.weight" in load_file(tmp_path / "e/model.safetensors")


@pytest.mark.parametrize("kind", [ExtraTensor, OwnMethods, PostHook])
def test_weights_of_a_file_are_loaded_by_the_models_own_code_too(tmp_path, kind):
    save_model.save(trained(kind), tmp_path / "e", control.start())
    found = nn.Sequential(nn.Linear(4, 3), kind())
    _, problems = weight_files.load(found, tmp_path / "e")
    assert not problems and found[1].count == 3


def test_what_the_models_own_code_raises_is_said(tmp_path):
    save_model.save(trained(OwnMethods), tmp_path / "e", control.start())
    found = nn.Sequential(nn.Linear(4, 3), SavesOnly())
    _, problems = weight_files.load(found, tmp_path / "e")
    assert "Sequential.load_state_dict failed (Sequential.load_state_dict does not take 1.count" in problems[0]


class Older(nn.Module):
    """What `Renamed` was."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"old": nn.Linear(3, 2)})
        self.register_buffer("count", torch.tensor(3))


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"new": nn.Linear(3, 2)})
        self.register_buffer("number", torch.tensor(0))
        self.inner.register_load_state_dict_pre_hook(self.rename)
        self._register_load_state_dict_pre_hook(self.rename_buffer)

    @staticmethod
    def rename(module, state, prefix, *_):
        for name in ("weight", "bias"):
            if f"{prefix}old.{name}" in state:
                state[f"{prefix}new.{name}"] = state.pop(f"{prefix}old.{name}")

    @staticmethod
    def rename_buffer(state, prefix, *_):
        if f"{prefix}count" in state:
            state[f"{prefix}number"] = state.pop(f"{prefix}count")


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: nn.Sequential(model)])
def test_weights_with_older_names_are_loaded_as_the_models_hooks_rename_them(tmp_path, caplog, wrap):
    older, found = wrap(Older()), wrap(Renamed())
    save_model.save(older, tmp_path / "e", control.start())
    loaded, problems = weight_files.load(found, tmp_path / "e")
    assert not problems and loaded == {*found.state_dict()}
    expected = wrap(Renamed())
    expected.load_state_dict(older.state_dict())
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())
    assert "does not have" not in caplog.text


def test_weights_without_a_place_in_the_model_are_told_where_it_keeps_some_of_its_own(tmp_path, caplog):
    save_model.save(Older(), tmp_path / "e", control.start())
    model = nn.ModuleDict({"inner": nn.ModuleDict({"new": nn.Linear(3, 2)})})
    _, problems = weight_files.load(model, tmp_path / "e")
    assert not problems
    assert "has count, inner.old.bias, inner.old.weight, which the model does not have; " in caplog.text
    assert "keeps its own values of inner.new.bias, inner.new.weight." in caplog.text


def test_weights_of_a_part_of_the_model_are_told(tmp_path, caplog):
    """torch refuses them in load_state_dict; for adapters on a base they are meant."""
    save_model.save(nn.ModuleDict({"base": nn.Linear(3, 2)}), tmp_path / "e", control.start())
    model = nn.ModuleDict({"base": nn.Linear(3, 2), "head": nn.Linear(2, 1)})
    assert weight_files.load(model, tmp_path / "e") == ({"base.weight", "base.bias"}, [])
    assert "e: is not the whole model; the model keeps its own values of head.bias, head.weight." in caplog.text


def test_a_state_with_older_names_is_refused_with_the_way_to_its_weights(tmp_path):
    checkpoints.save(Live([Older()]), tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"its load hooks do not see .* merge CHECKPOINT -o FOLDER, and start"):
        checkpoints.load(Live([Renamed()]), tmp_path / "c")


class Converts(nn.Module):
    """Had its scale as a tenth before version 2."""

    _version = 2

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"] * 10
        super()._load_from_state_dict(state, prefix, metadata, *args)


class Averages:
    """Registered: holds the state dict of a module inside its own."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return {"average": self.module.state_dict(), "count": 1}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["average"])


@pytest.mark.parametrize("way", [lambda m: Live([m]), lambda m: registered(m), lambda m: registered(Averages(m))])
def test_a_state_of_the_present_version_is_not_converted(tmp_path, way):
    model, found = nn.Sequential(Converts(3.0)), nn.Sequential(Converts(1.0))
    checkpoints.save(way(model), tmp_path / "c")
    checkpoints.load(way(found), tmp_path / "c")
    assert found[0].scale.item() == 3.0
    assert manifest.read(tmp_path / "c").version == (5 if "registered.0" in way(model).objects else 1)


def registered(item):
    return Live([nn.Linear(1, 1)], objects={"registered.0": item})


def tied(*names, seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    for name in names:
        model[name].weight = model["a"].weight
    return model


@pytest.mark.parametrize("before", [(), ("b",)])
def test_values_of_a_tensor_that_is_tied_now_are_not_dropped_in_silence(tmp_path, before, caplog):
    model, found = tied(*before), tied("c", seed=1)
    checkpoints.save(Live([model]), tmp_path / "c")
    unchanged = found["a"].weight.detach().clone()
    with pytest.raises(
        CheckpointError, match=r"a\.weight and c\.weight are one tensor in the model, but have different "
    ):
        checkpoints.load(Live([found]), tmp_path / "c")
    assert torch.equal(found["a"].weight, unchanged)
    checkpoints.load(Live([found]), tmp_path / "c", strict=False)
    assert torch.equal(found["c"].weight, model["a"].weight)
    assert "are one tensor in the model" in caplog.text
    with torch.no_grad():
        model["c"].weight.copy_(model["a"].weight)
    checkpoints.save(Live([model]), tmp_path / "d")
    checkpoints.load(Live([found]), tmp_path / "d")


def in_order(names, seed):
    """A model with two tied layers, made in this order, and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.Adam(model.parameters())
    for layer in model.values():
        layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_layers_that_are_tied_may_change_places(tmp_path):
    (model, optimizer), (found, other) = in_order(("embed", "x", "head"), 0), in_order(("head", "x", "embed"), 1)
    checkpoints.save(Live([model], [optimizer]), tmp_path / "c")
    checkpoints.load(Live([found], [other]), tmp_path / "c")
    for name in ("embed", "x", "head"):
        one, two = (optimizer.state[model[name].weight], other.state[found[name].weight])
        assert torch.equal(model[name].weight, found[name].weight) and torch.equal(one["exp_avg"], two["exp_avg"])


def test_a_tied_tensor_loads_from_whichever_name_was_kept(tmp_path):
    """As of a converted checkpoint, from whose file its program had left the other name out."""
    model, _ = in_order(("embed", "x", "head"), 0)
    bare = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False), "x": model["x"]})
    checkpoints.save(Live([bare]), tmp_path / "c")
    checkpoints.load(Live([model]), tmp_path / "c")
    assert torch.equal(model["embed"].weight, bare["head"].weight)


def test_a_groups_names_stay_those_of_its_parameters(tmp_path):
    """Torch keeps the names of an optimizer made from named_parameters() beside them, in their order."""
    (model, _), (found, _) = in_order(("x", "y", "embed", "head"), 0), in_order(("head", "y", "x", "embed"), 1)
    optimizers = [torch.optim.Adam(one.named_parameters()) for one in (model, found)]
    checkpoints.save(Live([model], optimizers[:1]), tmp_path / "c")
    checkpoints.load(Live([found], optimizers[1:]), tmp_path / "c")
    (group,) = optimizers[1].param_groups
    assert group["param_names"] == ["head.weight", "y.weight", "x.weight"] == [*dict(found.named_parameters())]
