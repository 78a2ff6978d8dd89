"""Tensors whose memory or names are unusual: conjugate views, strides of their own, names that read the same."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from shardkit import Accelerator
from shardkit.checkpoint.exporting import save_model
from shardkit.checkpoint.states.state import Live, model_tensors
from shardkit.distributed import control
from shardkit.distributed.modules import unwrapped
from shardkit.errors import CheckpointError
from shardkit.runtime.checkpoints import objects
from shardkit.sharding.shared_memory import pairs_in_same_memory
from tests import checkpoints
from tests.ranks import RankError, log_lines


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Odd(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(numbers(3, 4, seed=seed).t())
        self.register_buffer("conjugate", numbers(2, 3, seed=seed, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch._neg_view(numbers(5, seed=seed)))
        self.register_buffer("last", numbers(2, 3, 4, 4, seed=seed).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_bytes_are_the_values(tmp_path, kind):
    model, found = Odd(1), Odd(2)
    checkpoints.save(Live([model]), tmp_path / "c", kind=kind)
    checkpoints.load(Live([found]), tmp_path / "c")
    save_model.save(model, tmp_path / "e", control.start())
    objects.save(model_tensors(model), tmp_path / "o.safetensors")
    for other in (
        found.state_dict(),
        load_file(tmp_path / "e/model.safetensors"),
        load_file(tmp_path / "o.safetensors"),
    ):
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def of_rank_0():
    import torch.distributed as dist

    from shardkit.sharding.init import fill_from_rank0

    model = Odd(dist.get_rank())
    fill_from_rank0(model, torch.device("cpu"))
    return {name: value.resolve_conj().resolve_neg() for name, value in model.state_dict().items()}


def test_every_rank_gets_the_values_of_rank_0(ranks):
    expected = Odd(0).state_dict()
    for found in ranks.run(2, of_rank_0):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


class Kept:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def test_tensors_whose_paths_read_the_same_stay_apart(tmp_path):
    value = {"a.b": torch.zeros(()), "a": {"b": torch.ones(())}, "c": [torch.ones(())], "c[0]": torch.zeros(())}
    checkpoints.save(Live([nn.Linear(1, 1)], objects={"registered.0": Kept(value)}), tmp_path / "c")
    found = Kept(None)
    checkpoints.load(Live([nn.Linear(1, 1)], objects={"registered.0": found}), tmp_path / "c")
    assert found.value == value


def own_order(folder):
    import torch.distributed as dist

    kept = Kept({"b": dist.get_rank(), "a": 0})
    checkpoints.save(Live([nn.Linear(1, 1)], objects={"registered.0": kept}), folder)
    found = Kept(None)
    checkpoints.load(Live([nn.Linear(1, 1)], objects={"registered.0": found}), folder)
    return list(found.value.items())


def test_what_differs_between_ranks_keeps_the_order_of_its_keys(ranks, tmp_path):
    assert ranks.run(2, own_order, tmp_path / "c") == [[("b", 0), ("a", 0)], [("b", 1), ("a", 0)]]


def test_keys_of_optimizer_state_may_have_slashes(tmp_path):
    def built(seed):
        model = nn.ParameterDict({"a": nn.Parameter(numbers(3, seed=seed)), "a/m": nn.Parameter(numbers(2, seed=seed))})
        optimizer = SGD(model.parameters(), lr=0.1)
        return Live([model], [optimizer])

    live, found = built(1), built(2)
    for parameter in live.models[0].values():
        live.optimizers[0].state[parameter] = {"m/v": parameter.detach() * 2, "u": parameter.detach() * 3}
    checkpoints.save(live, tmp_path / "c")
    checkpoints.load(found, tmp_path / "c")
    for parameter, other in zip(live.models[0].values(), found.models[0].values(), strict=True):
        rows = live.optimizers[0].state[parameter], found.optimizers[0].state[other]
        assert rows[0].keys() == rows[1].keys()
        assert all(torch.equal(rows[0][key], rows[1][key]) for key in rows[0])


def test_a_group_without_parameters_keeps_its_settings(tmp_path):
    def built(rate):
        model = nn.Linear(2, 2)
        return Live([model], [SGD([{"params": model.parameters()}, {"params": [], "lr": rate}], lr=0.1)])

    checkpoints.save(built(0.5), tmp_path / "c")
    found = built(0.25)
    checkpoints.load(found, tmp_path / "c")
    assert [group["lr"] for group in found.optimizers[0].param_groups] == [0.1, 0.5]


class Grows(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.ones(size))

    def _load_from_state_dict(self, state, prefix, *args):
        self.seen = torch.zeros_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *args)


def test_a_module_may_take_a_buffer_of_another_size(tmp_path):
    checkpoints.save(Live([nn.Sequential(Grows(3))]), tmp_path / "c")
    found = nn.Sequential(Grows(0))
    checkpoints.load(Live([found]), tmp_path / "c")
    assert torch.equal(found[0].seen, torch.ones(3))


class Composed(torch.Tensor):
    """As a quantized weight: its values are in other tensors."""

    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return Composed(args[0].values_, args[0].scale)


def test_tensors_without_memory_are_refused_by_name(tmp_path):
    plain, model = nn.Linear(3, 3), nn.Linear(3, 3)
    weight = Composed(torch.ones(3, 3, dtype=torch.int8), torch.ones(3))
    model.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(CheckpointError, match=r"model: weight: a Composed consists of several tensors"):
        checkpoints.save(Live([model]), tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"weight: a Composed consists of several tensors"):
        save_model.save(model, tmp_path / "e", control.start())
    checkpoints.save(Live([plain]), tmp_path / "p")
    with pytest.raises(CheckpointError, match=r"weight: is quantized in the model \(got a Composed\)"):
        checkpoints.load(Live([model]), tmp_path / "p")


def prepare_quantized():
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(Composed(torch.ones(3, 3, dtype=torch.int8), torch.ones(3)), requires_grad=False)
    with log_lines("shardkit.runtime.prepare") as lines:
        Accelerator(config={"distributed_type": "NO", "use_cpu": True}).prepare(model)
    return lines


def test_quantized_weights_are_said_before_the_training(ranks):
    ((line,),) = ranks.run(1, prepare_quantized)
    assert "quantized weights cannot be saved (got weight), so save_state will be refused unless" in line


class Quantized(nn.Module):
    """A frozen weight of several tensors, and a trained bias."""

    def __init__(self, scale: float):
        super().__init__()
        values = Composed(torch.ones(3, 3, dtype=torch.int8), torch.full((3,), scale))
        self.weight, self.bias = nn.Parameter(values, requires_grad=False), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ (self.weight.values_ * self.weight.scale) + self.bias


def replicate_quantized():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    model = Quantized(1.0 + accelerator.process_index)
    model, optimizer = accelerator.prepare(model, SGD([model.bias], lr=0.1))
    with log_lines("shardkit.runtime.likely_mistakes.same_weights") as lines:
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
    return accelerator.unwrap_model(model).weight.scale.tolist(), lines


def test_quantized_weights_are_those_of_rank_0_on_all_replicas(ranks):
    assert ranks.run(2, replicate_quantized) == [([1.0, 1.0, 1.0], [])] * 2


def shard_quantized(ignored):
    Accelerator(config={"use_cpu": True, "fsdp_config": ignored}).prepare(nn.Sequential(Quantized(1.0), nn.ReLU()))


def test_quantized_weights_that_fsdp_cannot_shard_are_refused_or_kept_whole(ranks):
    with pytest.raises(RankError, match=r"ModelError: model: 0\.weight is quantized, .* \(got Composed\); name its"):
        ranks.run(2, shard_quantized, {})
    ranks.run(2, shard_quantized, {"fsdp_ignored_modules": "0"})


# ---- modules and parameters that look like others ----


def test_only_torchs_own_wrapper_is_unwrapped():
    model = nn.Module()
    model._orig_mod, model.head = nn.Linear(1, 1), nn.Linear(1, 1)
    assert unwrapped(model) is model
    assert unwrapped(torch.compile(model, backend="eager")) is model


def test_two_tensors_of_one_name_are_refused():
    model = nn.Module()
    model._orig_mod, model.weight = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match="weight: two tensors of the model have this name"):
        model_tensors(model)


def sharing(kind):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    weight = model["a"].weight
    match kind:
        case "data":
            model["b"].weight = nn.Parameter(weight.data)
        case "transposed":
            model["b"].weight = nn.Parameter(weight.data.t())
        case "rows":
            model["b"].weight = nn.Parameter(weight.data[1:3])
        case "buffer":
            model["b"].register_buffer("view", weight.detach()[0])
        case "tied":
            model["b"].weight = weight
        case "frozen":
            model["b"].weight = nn.Parameter(weight.data, requires_grad=False)
            weight.requires_grad_(False)
        case "flat":
            flat = torch.zeros(40)
            model["a"].weight, model["b"].weight = (nn.Parameter(part.view(4, 5)) for part in flat.split(20))
        case "columns":
            model["a"].weight, model["b"].weight = map(nn.Parameter, torch.zeros(4, 8).chunk(2, dim=1))
    return model


@pytest.mark.parametrize("kind", ["data", "transposed", "rows", "buffer"])
def test_different_tensors_in_the_same_memory(kind):
    other = "b.view" if kind == "buffer" else "b.weight"
    assert pairs_in_same_memory(sharing(kind)) == [("a.weight", other)]


@pytest.mark.parametrize("kind", ["tied", "frozen", "flat", "columns"])
def test_what_does_not_overlap_or_is_the_same(kind):
    assert pairs_in_same_memory(sharing(kind)) == []


def refused():
    from shardkit import Accelerator
    from shardkit.errors import ModelError

    given = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
    with pytest.raises(ModelError, match=r"a\.weight and b\.weight are different tensors in the same memory.*clone"):
        Accelerator(config=given).prepare(sharing("data"))


def test_shards_cannot_share_memory(ranks):
    ranks.run(1, refused)
