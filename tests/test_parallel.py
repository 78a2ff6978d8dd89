"""What each rank holds, when it is gathered, and what the engine does with models that do not divide nicely."""

import copy
import gc
import sys
from abc import ABC
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardkit.config.meaning import MeshSizes, mesh_sizes
from shardkit.config.schema import Config, FsdpConfig
from shardkit.distributed import process
from shardkit.distributed.modules import unwrapped
from shardkit.errors import ConfigError, MachineError, ModelError
from shardkit.optim.clip import clip_grad_norm_
from shardkit.sharding import parallelize as engine
from shardkit.sharding import unfit
from shardkit.sharding.fsdp import internals
from shardkit.sharding.gradient_sync import gradient_sync
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize
from shardkit.sharding.units import units_of
from tests import models
from tests.engine import config_for, parallel, tokens, whole
from tests.models import Reductions
from tests.ranks import RankError

Item = TypeVar("Item")


# What each rank holds


def held(strategy: int) -> dict[str, Any]:
    """Bytes of parameters, gradients and Adam state on this rank, and of what is gathered after forward."""
    config = config_for(4, strategy, num_machines=2)
    model = parallel(models.Gpt(), config)
    loss = models.next_token_loss(model, tokens())
    gathered = sum(p.numel() for p in unwrapped(model).blocks.parameters() if not isinstance(p, DTensor))
    for block in unwrapped(model).blocks:
        gathered += sum(p._unsharded_param.untyped_storage().nbytes() // 4 for p in internals.parameters_of(block))
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    state = [value for entry in optimizer.state.values() for key, value in entry.items() if key != "step"]

    def local_bytes(tensors: Any) -> int:
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

    weight = unwrapped(model).blocks[0].qkv.weight
    return {
        "parameters": local_bytes(model.parameters()),
        "gradients": local_bytes(p.grad for p in model.parameters()),
        "state": local_bytes(state),
        "gathered_after_forward": gathered,
        "shape": tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape),
        "rows": whole(weight)[dist.get_rank() % 2].sum().item(),
    }


@pytest.mark.slow
@pytest.mark.requirement("A1")
@pytest.mark.parametrize(
    ("strategy", "share", "keeps"), [(1, 4, False), (2, 4, True), (3, 1, True), (4, 2, False), (5, 2, True)]
)
def test_a_strategy_splits_what_it_says(ranks, strategy, share, keeps):
    total = sum(p.nbytes for p in models.Gpt().parameters())
    in_blocks = sum(p.numel() for p in models.Gpt().blocks.parameters())
    for found in ranks.run(4, held, strategy):
        # Every tensor is padded by less than one row of 36 numbers a rank; there are 42 tensors.
        assert found["parameters"] == pytest.approx(total / share, rel=0.1)
        assert found["gradients"] == found["parameters"]
        assert found["state"] == 2 * found["parameters"]
        assert found["shape"] == (36 // share, 12)
        assert found["gathered_after_forward"] == (in_blocks if keeps else 0)


def hybrid_placement() -> tuple[list[int], list[int], float]:
    config = config_for(4, 4, num_machines=2)
    here = process.start(config)
    mesh = build_mesh(config, here)
    assert mesh is not None
    torch.manual_seed(here.rank)
    model = parallelize(models.Gpt(), config, mesh, here)
    first = next(p for p in model.parameters())
    ranks_of = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in ("shard", "replicate")]
    return *ranks_of, first.to_local().double().sum().item()


@pytest.mark.requirement("A1")
def test_hybrid_shards_inside_a_machine_and_replicates_across(ranks):
    found = ranks.run(4, hybrid_placement)
    assert [shard for shard, _, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [replicate for _, replicate, _ in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    sums = [total for _, _, total in found]
    assert sums[0] == sums[2] and sums[1] == sums[3] and sums[0] != sums[1]


def hybrid_on_machines(sizes: list[int], mesh: dict[str, int]) -> str:
    config = config_for(4, 4, shardkit={"mesh": mesh})
    here = process.start(config)
    try:
        found = build_mesh(config, replace(here, local_world_size=sizes[here.rank]))
    except ConfigError as error:
        return str(error)
    return " x ".join(map(str, found.shape))


def test_hybrid_on_machines_with_different_numbers_of_ranks_is_refused_on_all(ranks):
    for text in ranks.run(4, hybrid_on_machines, [2, 2, 1, 1], {}):
        assert "machines have different numbers of ranks (got 1 and 2); start equally many on each, or set" in text
    assert ranks.run(4, hybrid_on_machines, [2, 2, 1, 1], {"shard_size": 2}) == ["2 x 2"] * 4
    assert ranks.run(4, hybrid_on_machines, [2, 2, 2, 2], {}) == ["2 x 2"] * 4


def timeouts_of_a_mesh(strategy: int, machines: int) -> list[float]:
    """On a machine with a GPU that the run does not use: there torch makes a group for any mesh over gloo."""
    section = {"launch": {"process_group_timeout_s": 77.0}}
    config = config_for(4, strategy, shardkit=section, num_machines=machines)
    here, has_gpu = process.start(config), torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        mesh = build_mesh(config, here)
    finally:
        torch.cuda.is_available = has_gpu
    groups = [mesh.get_group(axis)._get_backend(torch.device("cpu")) for axis in range(mesh.ndim)]
    return [group.options._timeout.total_seconds() for group in groups]


@pytest.mark.parametrize(("strategy", "machines", "expected"), [(1, 1, [77.0]), (4, 2, [77.0, 77.0])])
def test_the_groups_of_a_mesh_have_the_configured_timeout(ranks, strategy, machines, expected):
    assert ranks.run(4, timeouts_of_a_mesh, strategy, machines) == [expected] * 4


def test_hybrid_sizes():
    assert mesh_sizes(config_for(8, 4), 8, 4) == MeshSizes(2, 4)
    assert mesh_sizes(config_for(8, 4, shardkit={"mesh": {"shard_size": 2}}), 8, 8) == MeshSizes(4, 2)
    assert mesh_sizes(config_for(8, 4, shardkit={"mesh": {"replicate_size": 8}}), 8, 8) == MeshSizes(8, 1)
    assert mesh_sizes(config_for(8, 1), 8, 4) == MeshSizes(1, 8) and mesh_sizes(config_for(8, 3), 8, 4).replicate == 8
    with pytest.raises(ConfigError, match=r"3 replicas x 2 ranks is not the world size \(got 8\)"):
        mesh_sizes(config_for(8, 4, shardkit={"mesh": {"replicate_size": 3, "shard_size": 2}}), 8, 8)


# When parameters are gathered


def order_of_backward(backward: str, forward: bool) -> tuple[list[str], list[str]]:
    """(gathers and gradient reductions in backward, gathers asked for ahead in forward) of the blocks, as traced."""
    config = config_for(2, 1, fsdp_backward_prefetch=backward, fsdp_forward_prefetch=forward)
    model = parallel(models.Gpt(layers=3), config)
    models.next_token_loss(model, tokens()).backward()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss = models.next_token_loss(model, tokens())
    ahead = [e.name for e in by_time(trace) if e.name.startswith("FSDP::forward_prefetch for blocks")]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        loss.backward()
    names = [e.name for e in by_time(trace) if "(blocks." in e.name]
    short = {"FSDP::all_gather (blocks.": "gather ", "FSDP::post_backward_reduce (blocks.": "reduce "}
    seen = [short[key] + n.removeprefix(key)[0] for n in names for key in short if n.startswith(key)]
    return seen, [name.removeprefix("FSDP::forward_prefetch for ") for name in ahead]


def by_time(trace: profile) -> list[Any]:
    return sorted(trace.events(), key=lambda event: event.time_range.start)


@pytest.mark.slow
@pytest.mark.requirement("A4")
@pytest.mark.parametrize("backward", ["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"])
def test_backward_prefetch_decides_the_order(ranks, backward):
    seen, _ = ranks.run(2, order_of_backward, backward, False)[0]
    if backward == "BACKWARD_PRE":
        assert seen == ["gather 2", "gather 1", "reduce 2", "gather 0", "reduce 1", "reduce 0"]
    else:
        assert seen == ["gather 2", "reduce 2", "gather 1", "reduce 1", "gather 0", "reduce 0"]


@pytest.mark.requirement("A4")
@pytest.mark.slow
def test_forward_prefetch_gathers_the_next_unit(ranks):
    assert ranks.run(2, order_of_backward, "BACKWARD_PRE", True)[0][1] == ["blocks.1", "blocks.2"]
    assert ranks.run(2, order_of_backward, "BACKWARD_PRE", False)[0][1] == []


# Cutting a live model


@pytest.mark.requirement("A3")
def test_one_class_or_several():
    model = models.Gpt()
    one = units_of(model, FsdpConfig(transformer_layer_cls_to_wrap="Block"))
    assert [unit.fqn for unit in one.units] == ["blocks.0", "blocks.1", "blocks.2", ""]
    two = units_of(model, FsdpConfig(transformer_layer_cls_to_wrap="Block, Embedding"))
    assert [unit.fqn for unit in two.units] == ["embed", "blocks.0", "blocks.1", "blocks.2", ""]
    assert set(two.units[0].parameters) == {"embed.weight"}
    assert set(two.units[-1].parameters) == {"norm.weight", "norm.bias", "head.weight"}


def test_a_shared_parameter_belongs_to_the_unit_around_all_its_modules():
    model = models.Gpt(tied=True)
    cut = units_of(model, FsdpConfig(transformer_layer_cls_to_wrap="Block,Embedding"))
    assert cut.cut.owner["embed.weight"] == ""
    # Both ends are units: the smaller one goes up, or FSDP2 would not find the parameter.
    cut = units_of(model, FsdpConfig(transformer_layer_cls_to_wrap="Block,Embedding,Linear"))
    fqns = [unit.fqn for unit in cut.units]
    assert cut.cut.owner["embed.weight"] == "" and not {"embed", "head"} <= set(fqns)


def shared_between_units(wrap: str) -> float:
    """How far training with tied ends, both named as units, is from training in one process."""
    torch.manual_seed(0)
    model = models.Gpt(tied=True)
    nn.init.normal_(model.embed.weight, std=0.2)
    model.blocks[2].up = model.blocks[0].up  # a whole module in two units
    model.blocks[1].norm1.weight = model.norm.weight
    expected = steps(copy.deepcopy(model), tokens())
    found = steps(parallel(model, config_for(2, fsdp_transformer_layer_cls_to_wrap=wrap)), tokens())
    assert found.keys() == expected.keys()
    return max((found[fqn] - expected[fqn]).abs().max().item() for fqn in expected)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["Block", "Block,Embedding,Linear,LayerNorm"])
def test_shared_parameters_and_modules_train_as_in_one_process(ranks, wrap):
    assert max(ranks.run(2, shared_between_units, wrap)) < 1e-6


def test_a_container_is_never_a_unit():
    cut = units_of(models.Gpt(), FsdpConfig(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=600))
    assert "blocks" not in [unit.fqn for unit in cut.units]
    assert "blocks.0" in [unit.fqn for unit in cut.units]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x)[0]


def attention_by_size(encoder: bool, expected_units: list[str]) -> float:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) if encoder else Attending()
    model = nn.Sequential(layer, nn.Linear(8, 8))
    data = torch.randn(2, 3, 8)
    expected = steps(copy.deepcopy(model), data)
    wrap = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 50}
    sharded = parallel(model, config_for(2, **wrap))
    assert [type(m).__name__ for m in sharded.modules() if isinstance(m, FSDPModule)] == expected_units
    found = steps(sharded, data)
    with torch.no_grad():
        sharded.eval()(data)
    return max((found[fqn] - expected[fqn]).abs().max().item() for fqn in expected)


@pytest.mark.parametrize(
    ("encoder", "units_found"),
    [
        (True, ["Sequential", "TransformerEncoderLayer", "Linear"]),
        (False, ["Sequential", "MultiheadAttention", "Linear"]),
    ],
)
def test_attention_that_uses_weights_without_calling_their_module(ranks, encoder, units_found):
    assert max(ranks.run(2, attention_by_size, encoder, units_found)) < 1e-6


def mixed_into_a_model_that_torch_sharded() -> float:
    torch.manual_seed(0)
    trained, reference = parallel(models.Gpt(), config_for(2)), models.Gpt()
    expected = [(whole(q) + p) / 2 for p, q in zip(reference.parameters(), trained.parameters(), strict=True)]
    fully_shard(reference)
    for parameter, other in zip(reference.parameters(), trained.parameters(), strict=True):
        parameter.data.mul_(0.5).add_(other.data, alpha=0.5)
    found = zip(reference.parameters(), expected, strict=True)
    return max((whole(parameter) - wanted).abs().max().item() for parameter, wanted in found)


def test_weights_are_mixed_into_a_model_that_a_library_has_sharded_itself(ranks):
    assert max(ranks.run(2, mixed_into_a_model_that_torch_sharded)) < 1e-6


def names_of_classes() -> list[str]:
    sharded = parallel(models.Gpt(), config_for(2))
    kinds = [type(module) for module in (sharded, sharded.blocks[0]) if isinstance(module, FSDPModule)]
    return [f"{kind.__module__}.{kind.__qualname__}, {kind.__name__}" for kind in kinds]


def test_libraries_that_look_up_the_name_of_a_models_class_find_it(ranks):
    assert ranks.run(2, names_of_classes)[0] == ["tests.models.Gpt, Gpt", "tests.models.Block, Block"]


class Loaded(nn.Module):
    """Makes another of its class in two calls, as sentence-transformers loads its best model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    @classmethod
    def load(cls, width: int) -> nn.Module:
        made = cls.__new__(cls)
        made.noted = "before __init__"
        made.__init__(width)
        return made


def made_by_a_sharded_models_class() -> list[bool]:
    """Whether each way to make a module by the class of a sharded one gives a plain one, and its weights are loaded."""
    sharded = parallel(Loaded(8), config_for(2))
    assert isinstance(sharded, FSDPModule)
    plain = [sharded.load(8), type(sharded)(8), type(sharded)(width=8)]
    found = [type(made) is Loaded and not isinstance(made, FSDPModule) for made in plain]
    loaded = plain[0]
    sharded.load_state_dict(loaded.state_dict())
    return [*found, loaded.noted == "before __init__", torch.equal(whole(sharded.inner.weight), loaded.inner.weight)]


def test_the_class_of_a_sharded_model_makes_plain_ones(ranks):
    assert ranks.run(2, made_by_a_sharded_models_class) == [[True] * 5] * 2


class Layer(Generic[Item], nn.Linear):
    """Laid out in memory by another base than nn.Module."""


class Stacked(ABC, nn.Module):
    """The same of the root."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.last = Layer(8, 8), Layer(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def classes_with_another_base_first() -> tuple[list[str], float]:
    torch.manual_seed(0)
    model, data = Stacked(), torch.randn(2, 8)
    expected = steps(copy.deepcopy(model), data)
    sharded = parallel(model, config_for(2, fsdp_transformer_layer_cls_to_wrap="Layer")).to("cpu")
    assert isinstance(sharded, Stacked) and isinstance(sharded.first, Layer)
    kinds = [type(module) for module in sharded.modules() if isinstance(module, FSDPModule)]
    assert all(kind._apply is FSDPModule._apply for kind in kinds), "the order of methods is that of torch's classes"
    found = steps(sharded, data)
    return [kind.__name__ for kind in kinds], max((found[fqn] - expected[fqn]).abs().max().item() for fqn in expected)


def test_a_class_may_have_another_base_before_that_of_modules(ranks):
    for names, difference in ranks.run(2, classes_with_another_base_first):
        assert names == ["Stacked", "Layer", "Layer"] and difference < 1e-6


def test_an_odd_dtype_becomes_a_unit_or_is_refused():
    model = models.Gpt()
    model.blocks[1].norm1.double()
    cut = units_of(model, FsdpConfig())
    assert [unit.fqn for unit in cut.units if unit.keeps_dtype] == ["blocks.1.norm1"]
    model.norm.weight.data = model.norm.weight.data.double()
    with pytest.raises(ModelError, match=r"unit root has trainable parameters of several dtypes .*norm.weight is"):
        units_of(model, FsdpConfig())


class Spectral(nn.Module):
    """Complex weights of its own beside a linear layer, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.fft.irfft(torch.fft.rfft(x) * self.weights.sum(1), 4)


def spectral_step() -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*[Spectral() for _ in range(2)])
    sharded = parallel(copy.deepcopy(model), config_for(2, 1))
    for one in (model, sharded):
        one(torch.ones(2, 4)).square().sum().backward()
    pairs = zip(model.parameters(), sharded.parameters(), strict=True)
    return max((a.grad - whole(b.grad)).abs().max().item() for a, b in pairs)


def test_where_the_parameters_of_a_block_itself_are_of_the_rarer_dtype_its_modules_become_units(ranks):
    cut = units_of(nn.Sequential(*[Spectral() for _ in range(2)]), FsdpConfig())
    assert [unit.fqn for unit in cut.units] == ["0.linear", "0", "1.linear", "1", ""]
    assert max(ranks.run(2, spectral_step)) < 1e-5


def test_ignored_modules_are_a_regular_expression():
    cut = units_of(models.Gpt(), FsdpConfig(ignored_modules=r"blocks\.0|norm"))
    assert set(cut.ignored) == {"blocks.0", "norm"}
    assert "norm.bias" in cut.replicated and "blocks.0" not in [unit.fqn for unit in cut.units]
    with pytest.raises(ModelError, match=r"no module name fully matches \(got 'block'\)"):
        units_of(models.Gpt(), FsdpConfig(ignored_modules="block"))
    with pytest.raises(ModelError, match=r"not a regular expression \(got '\['"):
        units_of(models.Gpt(), FsdpConfig(ignored_modules="["))


class WithPrompt(nn.Module):
    """As peft's models with prompt learning: what it saves is what a part of it returns, on rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.prompt_encoder = nn.ModuleDict({"default": nn.Linear(4, 4)})
        self.prompt_tokens = nn.Buffer(torch.ones(2, 4))
        self.base_model = models.Gpt()

    def get_prompt_embedding_to_save(self):
        return self.prompt_encoder["default"](self.prompt_tokens)


def test_a_prompt_encoder_is_whole_on_every_rank():
    cut = units_of(WithPrompt(), FsdpConfig())
    assert set(cut.ignored) == {"prompt_encoder"}
    assert set(cut.replicated) == {"prompt_encoder.default.weight", "prompt_encoder.default.bias"}
    by_hand = units_of(WithPrompt(), FsdpConfig(ignored_modules=r"prompt_encoder\.default|base_model\.norm"))
    assert set(by_hand.ignored) == {"prompt_encoder", "base_model.norm"}


def wrong_class() -> None:
    parallel(models.Gpt(), config_for(2, fsdp_transformer_layer_cls_to_wrap="Blok"))


def test_all_ranks_refuse_together(ranks):
    with pytest.raises(RankError, match=r"no module of class Blok .*did you mean Block\?") as caught:
        ranks.run(2, wrong_class)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_in_place = nn.Linear(4, 4), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_in_place:
            x *= 1.5
        return self.inner(x if self.is_in_place else x * 1.5)


def an_input_changed_in_place() -> str:
    model = parallel(
        nn.Sequential(nn.Linear(4, 4), Scaled()), config_for(2, fsdp_transformer_layer_cls_to_wrap="Scaled")
    )
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 4))
    model[1].is_in_place = False
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return str(caught.value)


def test_an_input_that_a_unit_changes_in_place_is_told(ranks):
    (said, _) = ranks.run(2, an_input_changed_in_place)
    assert said.startswith("forward: the input of a wrapped block is changed in place") and "write x = x * 2" in said


def test_a_model_that_torch_has_made_parallel_is_refused(ranks):
    for strategy in (1, 3):
        for wrapper in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
            (text, _) = ranks.run(2, refusal_of_wrapped, wrapper, strategy)
            assert text == f"model: is already parallel (got a {wrapper} in it); give the unwrapped model, once."


def refusal_of_wrapped(wrapper: str, strategy: int) -> str:
    from torch.distributed import fsdp

    wrap = getattr(nn.parallel, wrapper, None) or partial(fsdp.FullyShardedDataParallel, device_id=torch.device("cpu"))
    with pytest.raises(ModelError) as refused:
        parallel(wrap(models.Gpt()), config_for(2, strategy))
    return str(refused.value)


def refusals() -> list[str]:
    twice = parallel(models.Gpt(), config_for(2))
    models_ = [twice, nn.Sequential(nn.LazyLinear(2)), nn.Sequential(nn.Embedding(4, 4, sparse=True)), models.Gpt()]
    models_.append(nn.Embedding(4, 4, sparse=True))
    texts = []
    for model, wrap in zip(models_, ("Block", "Block", "Block", "ModuleList", "Block"), strict=True):
        try:
            parallel(model, config_for(2, fsdp_transformer_layer_cls_to_wrap=wrap))
        except ModelError as error:
            texts.append(str(error))
    return texts


def test_what_cannot_be_parallelized_is_said_in_words(ranks):
    twice, lazy, sparse, container, all_sparse = ranks.run(2, refusals)[0]
    assert twice == (
        "model: is already sharded (got a sharded Gpt in it), by the script, by an Accelerator with other settings, or "
        "as a part of another model; build the model anew, and prepare it once."
    )
    assert "model: 0.weight has no shape yet; run one batch through the model first." in lazy
    instead = (
        "has sparse gradients, which FSDP cannot reduce; create it with sparse=False and train it with another "
        "optimizer than SparseAdam, or use strategy NO_SHARD."
    )
    assert (sparse, all_sparse) == (f"model: 0 {instead}", f"model: it {instead}")
    assert "ModuleList is a container without a forward, so it cannot be a unit" in container


@pytest.mark.requirement("A2")
def test_offloading_on_a_cpu_is_a_note(caplog, monkeypatch):
    monkeypatch.setattr(engine.log.parent, "propagate", True)
    config = config_for(1, fsdp_offload_params=True)
    with caplog.at_level("INFO"):
        assert engine._device_of_shards(config, process.start(config_for(1, 3))) == torch.device("cpu")
    assert "no effect on the CPU: parameters and gradients are already in host memory" in caplog.text


# Models that do not divide nicely


def steps(model: nn.Module, data: torch.Tensor, count: int = 3) -> dict[str, torch.Tensor]:
    """The trained parameters after `count` steps of SGD on the mean square of the outputs."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(count):
        model(data).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: whole(p).detach().clone() for fqn, p in unwrapped(model).named_parameters()}


def odd_shapes(config: Config, accumulate: bool) -> float:
    """How far training `Scaled` on all ranks is from training it in one process."""
    torch.manual_seed(0)
    model = models.Scaled()
    data = torch.randn(4, 8)
    expected = steps(copy.deepcopy(model), data)
    sharded = parallel(model, config)
    mine = data.chunk(dist.get_world_size())[dist.get_rank()]
    if accumulate:
        with gradient_sync([sharded], enabled=False):
            sharded(mine).square().mean().backward()
        sharded(mine).square().mean().backward()
        for parameter in sharded.parameters():
            parameter.grad = None
    found = steps(sharded, mine)
    return max((found[fqn] - expected[fqn]).abs().max().item() for fqn in expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 5])
def test_a_parameter_without_a_dimension_and_rows_fewer_than_ranks(ranks, strategy):
    config = config_for(4, strategy, num_machines=2, fsdp_transformer_layer_cls_to_wrap="Sequential")
    assert max(ranks.run(4, odd_shapes, config, True)) < 1e-6


def after_an_aborted_backward() -> list[float]:
    model = parallel(models.Scaled(), config_for(2, fsdp_transformer_layer_cls_to_wrap="Sequential"))
    data = torch.randn(2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    hook = model.inner[0][0].register_full_backward_hook(_raise)
    with pytest.raises(RuntimeError, match="aborted"):
        model(data).square().mean().backward()
    hook.remove()
    getattr(model, "reset_iter_state", lambda: None)()  # torch 2.11 has none, and none is needed
    model.zero_grad()
    model(data).square().mean().backward()
    scales = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(scales, model.scale.grad)
    return [scale.item() for scale in scales]


def _raise(*_: Any) -> None:
    raise RuntimeError("aborted")


def test_an_aborted_backward_leaves_no_trace(ranks):
    for first, second in ranks.run(2, after_an_aborted_backward):
        assert first == second


class NamedStream(torch.cpu.Stream):
    """Notes for whom it waits: (its name, the other's)."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self.waits = name, waits

    def wait_stream(self, stream: Any) -> None:
        self.waits.append((self.name, getattr(stream, "name", "")))


def test_streams_wait_for_each_other_after_an_aborted_pass(alone, monkeypatch):
    """Memory that the pass has left is used again at once, by any of them. A CPU has no streams: these stand for a
    GPU's."""
    model = parallel(models.Scaled(), config_for(1, fsdp_transformer_layer_cls_to_wrap="Sequential"))
    shared, waits = internals.root_of(model)._comm_ctx, []
    own = NamedStream("the script's", waits)
    names = [name for name in vars(shared) if name.endswith("_stream")]
    for name in names:
        monkeypatch.setattr(shared, name, NamedStream(name, waits))
    monkeypatch.setattr(shared, "device_handle", SimpleNamespace(current_stream=lambda: own))
    model.head.register_forward_pre_hook(_raise)
    with pytest.raises(RuntimeError, match="aborted"):
        model(torch.ones(2, 8))
    found = [pair for pair in waits if own.name in pair]
    assert len(names) == 4
    assert {*found[:4]} == {(own.name, name) for name in names} and {*found[4:]} == {(n, own.name) for n in names}


def test_ignored_modules_train_on_all_ranks_alike(ranks):
    config = config_for(2, fsdp_transformer_layer_cls_to_wrap="Sequential", fsdp_ignored_modules=r"inner\.0|head")
    assert max(ranks.run(2, odd_shapes, config, False)) < 1e-6


def ignored_in_bf16() -> list[str]:
    config = config_for(
        2, mixed_precision="bf16", fsdp_transformer_layer_cls_to_wrap="Block", fsdp_ignored_modules=r"blocks\.1|head"
    )
    model = parallel(models.Gpt(), config)
    seen: list[str] = []
    model.blocks[1].up.register_forward_hook(lambda m, a, out: seen.append(f"ignored {out.dtype}"))
    model.blocks[2].up.register_forward_hook(lambda m, a, out: seen.append(f"unit {out.dtype}"))
    models.next_token_loss(model, tokens()).backward()
    return seen


def test_ignored_modules_keep_their_dtype(ranks):
    assert ranks.run(2, ignored_in_bf16)[0] == ["ignored torch.float32", "unit torch.bfloat16"]


def frozen_parts() -> tuple[bool, bool, int]:
    """(frozen weights did not move, adapters did, number of gradients) of a block with a low-rank adapter."""
    torch.manual_seed(0)
    model = models.Gpt()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)
    sharded = parallel(model, config_for(2))
    before = {fqn: whole(p).detach().clone() for fqn, p in sharded.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        models.next_token_loss(sharded, tokens(dist.get_rank())).backward()
        gradients = sum(p.grad is not None for p in sharded.parameters())
        optimizer.step()
        optimizer.zero_grad()
    after = {fqn: whole(p).detach() for fqn, p in sharded.named_parameters()}
    adapters = {fqn for fqn in before if "adapter" in fqn}
    still = all(torch.equal(before[fqn], after[fqn]) for fqn in before if fqn not in adapters)
    return still, all(not torch.equal(before[fqn], after[fqn]) for fqn in adapters), gradients


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank correction."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.adapter_in = nn.Linear(base.in_features, 2, bias=False)
        self.adapter_out = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter_out(self.adapter_in(x))


@pytest.mark.requirement("N4")
def test_frozen_and_trained_parameters_share_a_unit(ranks):
    assert ranks.run(2, frozen_parts) == [(True, True, 6), (True, True, 6)]


class OneOfTwo(nn.Module):
    """Each rank uses a different branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.branches[dist.get_rank()](x))


def different_branches(strategy: int, wrap: str) -> list[float]:
    torch.manual_seed(0)
    model = OneOfTwo()
    x = torch.ones(1, 4)
    for branch in model.branches:
        (model.head(branch(x)).sum() / 2).backward()
    expected = [p.grad.abs().sum().item() for p in model.parameters()]
    model.zero_grad()
    settings = {"shardkit": {"ddp_find_unused_parameters": True}, "fsdp_auto_wrap_policy": wrap}
    model = parallel(model, config_for(2, strategy, **settings))
    model(x).sum().backward()
    return [(a - whole(p.grad).abs().sum()).abs().item() for a, p in zip(expected, model.parameters(), strict=True)]


@pytest.mark.parametrize("strategy", [1, 3])
def test_ranks_may_use_different_parameters(ranks, strategy):
    if strategy != 3 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("FSDP reduces unused parameters from torch 2.13 on")
    for differences in ranks.run(2, different_branches, strategy, "NO_WRAP"):
        assert max(differences) < 1e-6


def nothing_to_train() -> tuple[bool, bool]:
    model = models.Gpt().requires_grad_(False)
    replicated = parallel(copy.deepcopy(model), config_for(2, 3))
    sharded = parallel(copy.deepcopy(model), config_for(2, 1))
    with torch.no_grad():
        same = torch.allclose(sharded(tokens()), replicated(tokens()), atol=1e-6)
    return isinstance(replicated, models.Gpt), same


def test_a_frozen_model_is_accepted(ranks):
    assert ranks.run(2, nothing_to_train) == [(True, True)] * 2


# Where all ranks start


def starting_values(strategy: int, sync: bool) -> list[float]:
    config = config_for(2, strategy, fsdp_sync_module_states=sync)
    torch.manual_seed(dist.get_rank())
    model = models.Gpt()
    model.register_buffer("mine", torch.tensor([dist.get_rank() == 0]))
    model = unwrapped(parallel(model, config))
    full = [whole(p).detach().double().sum().item() for p in model.parameters()]
    return [*full, float(model.mine)]


@pytest.mark.slow
@pytest.mark.requirement("A7")
@pytest.mark.parametrize("strategy", [1, 3, 5])
def test_every_rank_starts_from_rank_0(ranks, strategy):
    torch.manual_seed(0)
    expected = [p.detach().double().sum().item() for p in models.Gpt().parameters()]
    for found in ranks.run(2, starting_values, strategy, True):
        assert found == pytest.approx([*expected, 1.0])
    others = ranks.run(2, starting_values, strategy, False)
    assert others[0][-1] != others[1][-1]


def different_models() -> None:
    parallel(models.Gpt(layers=2 + dist.get_rank()), config_for(2))


def test_different_models_are_refused(ranks):
    with pytest.raises(RankError, match=r"differ from rank 0's in name, shape or dtype \(got this on rank 1\)"):
        ranks.run(2, different_models)


# Accumulation without communication


def reductions(strategy: int) -> tuple[int, int]:
    """Gradient reductions in a backward with synchronisation off, and on."""
    model = parallel(models.Gpt(), config_for(2, strategy))
    counts = []
    for enabled in (False, True):
        with Reductions() as reduced, gradient_sync([model], enabled):
            models.next_token_loss(model, tokens()).backward()
        counts.append(len(reduced.dtypes))
    return counts[0], counts[1]


@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_are_reduced_only_when_asked(ranks, strategy):
    off, on = ranks.run(2, reductions, strategy)[0]
    assert off == 0 and on > 0


def sync_is_restored() -> list[bool]:
    seen = []
    for strategy in (1, 3):
        model = parallel(models.Gpt(), config_for(2, strategy))
        with gradient_sync([model], enabled=False):
            with gradient_sync([model], enabled=True):
                pass
            models.next_token_loss(model, tokens(dist.get_rank())).backward()
        models.next_token_loss(model, tokens(dist.get_rank())).backward()
        grads = [whole(p.grad).double().sum() for p in model.parameters()]
        total = torch.stack(grads).sum()
        everyone = [torch.zeros_like(total) for _ in range(2)]
        dist.all_gather(everyone, total)
        seen.append(bool(everyone[0] == everyone[1]))
    return seen


def test_sync_is_restored_to_what_it_was(ranks):
    assert ranks.run(2, sync_is_restored) == [[True, True]] * 2


def clipped_once() -> None:
    model = parallel(models.Gpt(), config_for(2, strategy=1))
    models.next_token_loss(model, tokens()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.full_tensor()


def threads_of_groups() -> int:
    """How many process groups of gloo this rank has; each has a thread that wakes a hundred times a second."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc")
def test_a_group_ends_with_its_run(ranks):
    """DTensor keeps meshes in its caches, and a mesh keeps its groups."""
    before = ranks.run(2, threads_of_groups)
    if not min(before):
        pytest.skip(f"torch {torch.__version__} gives the threads of gloo no names")
    ranks.run(2, clipped_once)
    assert ranks.run(2, threads_of_groups) == before


def freed_soon_after_a_collective() -> None:
    """Frees a model when its group has ended, while threads of the group wait for the GIL to free their last work."""
    found = sys.getswitchinterval()
    sys.setswitchinterval(5.0)  # for so long the main thread keeps the GIL
    try:
        model = parallel(models.Gpt(), config_for(2, strategy=3))
        models.next_token_loss(model, tokens()).backward()
        for work in [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(8)]:
            work.wait()
        process.leave()
        del model
        gc.collect()
    finally:
        sys.setswitchinterval(found)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.slow
def test_a_model_is_freed_after_its_group(ranks):
    for _ in range(12):  # of those in another order one in three hung
        ranks.run(2, freed_soon_after_a_collective)


# Memory


def memory_is_given_back() -> int:
    """Bytes of whole parameters that an optimizer built before still holds on to."""
    model = models.Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    parallel(model, config_for(2))
    return sum(p.untyped_storage().nbytes() for group in optimizer.param_groups for p in group["params"])


def test_nothing_keeps_the_whole_parameters(ranks):
    assert ranks.run(2, memory_is_given_back) == [0, 0]


def test_a_torch_without_all_of_fsdp2_is_refused():
    for version in ("2.11.0", "2.13.0+cpu", "2.15.0a0+git1234"):
        unfit.refuse_old(version)
    with pytest.raises(
        MachineError, match=r"FSDP: needs torch 2\.11 or newer \(got 2\.9\.0\+cu128, which is only supported"
    ):
        unfit.refuse_old("2.9.0+cu128")


def test_a_torch_that_nobody_has_tried_is_said_once(caplog):
    caplog.set_level("WARNING", "shardkit")
    for version in ("2.11.0", "2.15.1+cu132", "2.15.0a0+git1234"):
        internals.warn_of_newer(version)
    assert not caplog.text
    for _ in range(2):
        internals.warn_of_newer("2.16.0.dev20261101+cpu")
    assert caplog.text.count("torch 2.16.0.dev20261101+cpu is newer than any that shardkit was tested with") == 1


class Writing(nn.Module):
    """Writes to its own parameter, of the root unit, in forward: a temperature that is clamped, a codebook, a teacher
    that follows."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write, self.scale, self.layer = write, nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.write == "in place":
                self.scale.clamp_(0.1, 0.5)
            elif self.write == "data":
                self.scale.data = self.scale.data * 0.9
            elif self.write == "in place of data":
                self.scale.data.copy_(self.scale.data * 0.9)
            elif self.write == "another":
                self.scale = nn.Parameter(self.scale * 0.9)
        return self.layer(x) * self.scale


def write_in_forward(strategy: int, write: str) -> None:
    model = parallel(Writing(write), config_for(2, strategy))
    with torch.no_grad():
        model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("write", ["in place", "data", "in place of data", "another"])
def test_a_write_in_forward_that_would_be_lost_is_refused(ranks, write):
    for strategy in (1, 2):
        with pytest.raises(RankError, match="forward: scale was written during forward, and the new values"):
            ranks.run(2, write_in_forward, strategy, write)
    ranks.run(2, write_in_forward, 3, write)
    ranks.run(2, write_in_forward, 1, "nothing")
