"""Activation checkpointing and compilation of blocks: the same gradients, what is recomputed, and what is refused."""

import copy
import inspect
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit.distributed.modules import unwrapped
from shardkit.errors import ModelError, UsageError
from shardkit.sharding.activation import checkpoint_blocks
from shardkit.sharding.offload import offload_blocks
from tests import models
from tests.engine import config_for, parallel, tokens, whole
from tests.ranks import RankError


def recomputed(strategy: int, wrap: str, **settings: Any) -> tuple[float, list[str], int]:
    """(largest difference of gradients with and without recomputing, parameter names, forward runs of a block)."""
    runs = []
    gradients = []
    for checkpointing in (False, True):
        config = config_for(
            2,
            strategy,
            fsdp_auto_wrap_policy=wrap,
            fsdp_min_num_params=300,
            fsdp_activation_checkpointing=checkpointing,
            shardkit=settings,
        )
        torch.manual_seed(0)
        model = parallel(models.Gpt(dropout=0.5), config)
        inner = unwrapped(model)
        counter: list[int] = []
        inner.blocks[0].up.register_forward_hook(lambda *_, counter=counter: counter.append(1))
        torch.manual_seed(3)
        models.next_token_loss(model, tokens()).backward()
        runs.append(len(counter))
        gradients.append([whole(p.grad) for p in inner.parameters()])
    names = [fqn for fqn, _ in inner.named_parameters()]
    return max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True)), names, runs[1] - runs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "wrap"), [(1, "TRANSFORMER_BASED_WRAP"), (1, "NO_WRAP"), (2, "SIZE_BASED_WRAP"), (3, "NO_WRAP")]
)
def test_recomputing_draws_the_same_dropout_and_keeps_names(ranks, strategy, wrap):
    names = [fqn for fqn, _ in models.Gpt().named_parameters()]
    for difference, found, more_runs in ranks.run(2, recomputed, strategy, wrap):
        assert difference < 1e-6
        assert found == names
        assert more_runs == 1


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "forwards"), [({"recompute": "operators"}, 1), ({"recompute_every": 2}, 1)])
def test_modes_of_recomputing_give_the_same_gradients(ranks, settings, forwards):
    for difference, _, more_runs in ranks.run(2, recomputed_with, settings):
        assert difference < 1e-6
        assert more_runs == forwards


def recomputed_with(settings: dict[str, Any]) -> tuple[float, list[str], int]:
    return recomputed(1, "TRANSFORMER_BASED_WRAP", **settings)


def sparse_gradients_used_twice() -> str:
    model = parallel(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), config_for(2, 3))
    loss = model(torch.tensor([1, 2])).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError) as error:
        loss.backward()
    return str(error.value)


def test_sparse_gradients_that_torch_does_not_reduce_are_refused(ranks):
    for text in ranks.run(2, sparse_gradients_used_twice):
        assert text.startswith("backward: sparse gradients are reduced only where each backward follows a forward")


class Counted(models.ConvBlock):
    """Beside its running statistics it changes a number that it computes with."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * self.gain.clone()
        self.gain.mul_(0.5)
        return x


def with_changed_buffers(strategy: int, recompute: str | None, prefetches: bool = False) -> list[torch.Tensor]:
    """Gradients and buffers after two steps under bf16, where the norms are units inside the blocks."""
    fsdp = {
        "fsdp_transformer_layer_cls_to_wrap": "Counted",
        "fsdp_activation_checkpointing": recompute is not None,
        **({"fsdp_forward_prefetch": True, "fsdp_backward_prefetch": "NO_PREFETCH"} if prefetches else {}),
    }
    settings = {"recompute": recompute} if recompute else {}
    torch.manual_seed(0)
    model = models.ConvNet()
    model.blocks = nn.ModuleList(Counted(4) for _ in range(2))
    model = parallel(model, config_for(2, strategy, mixed_precision="bf16", shardkit=settings, **fsdp))
    for step in range(2):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(images).float().square().mean().backward()
    return [*(whole(p.grad) for p in model.parameters()), *model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "prefetches"), [(1, False), (1, True), pytest.param(2, False, marks=pytest.mark.slow)]
)
def test_what_a_recomputed_forward_changes_is_changed_once(ranks, strategy, prefetches):
    """With forward prefetch alone, a unit inside a block is gathered before the block, but inside its recomputation."""
    expected = ranks.run(2, with_changed_buffers, strategy, None)
    for recompute in ("blocks", "operators"):
        results = ranks.run(2, with_changed_buffers, strategy, recompute, prefetches)
        for found, plain in zip(results, expected, strict=True):
            for mine, one in zip(found, plain, strict=True):
                torch.testing.assert_close(mine, one)


def refused_statistics(mixed_precision: str) -> str:
    fsdp = {"fsdp_transformer_layer_cls_to_wrap": "ConvBlock", "fsdp_activation_checkpointing": True}
    config = config_for(2, 1, mixed_precision=mixed_precision, shardkit={"compile": True}, **fsdp)
    try:
        parallel(models.ConvNet(), config)
    except ModelError as error:
        return str(error)
    return "not refused"


@pytest.mark.slow
def test_statistics_that_a_compiled_recomputation_would_change_twice_are_refused(ranks):
    """In 16 bits the norm is a unit of its own inside the block, at which the compiled graph breaks."""
    for text in ranks.run(2, refused_statistics, "bf16"):
        assert text.startswith("model: the running statistics of BatchNorm2d would take each batch twice")
    assert ranks.run(2, refused_statistics, "no") == ["not refused"] * 2


@pytest.mark.parametrize("copies", [False, True])
def test_a_forward_can_be_recomputed_twice(copies):
    """Of a graph that is used again, with the buffers that the forward found; also of a copy of the model."""
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Counted(4), Counted(4))
        if recomputes:
            checkpoint_blocks(model, list(model))
        model = copy.deepcopy(model) if copies else model
        loss = model(torch.ones(2, 4, 3, 3).cumsum(2)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([model[0].conv.weight.grad, *model.buffers()])
    torch.testing.assert_close(*gradients)


class ChangedInPlace(nn.Module):
    """Changes the outputs of products in place: with and without bias, and in the gates of a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.products = nn.ModuleList(nn.Linear(8, 8, bias=has_bias) for has_bias in (False, True, True, False))
        self.gates = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product in self.products:
            x = product(x).mul_(2.0)
            x = nn.functional.relu(x, inplace=True) + 0.1
        x, _ = self.gates(nn.functional.scaled_dot_product_attention(x, x, x))
        return x


@pytest.mark.parametrize("recompute", ["blocks", "operators"])
def test_what_a_recomputed_block_changes_in_place_has_the_same_gradients(recompute):
    gradients = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(ChangedInPlace() for _ in range(2)))
        if recomputes:
            checkpoint_blocks(model, list(model), recompute)
        loss = model(torch.randn(2, 3, 8)).square().mean()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_every_nth_block_is_recomputed_in_the_order_of_the_model():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    checkpoint_blocks(model, sorted(model, key=lambda block: id(block)), every=3)
    assert [index for index, block in enumerate(model) if "forward" in vars(block)] == [0, 3, 6, 9]


@pytest.mark.parametrize(
    "change", [pytest.param(lambda blocks: checkpoint_blocks(blocks, blocks), id="recomputed"), offload_blocks]
)
@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_of_changed_blocks_computes_with_its_own_parameters(change, patched):
    """Such as an average of a model that DDP trains. A forward that was replaced stays the replacement."""
    model = nn.Sequential(nn.Linear(4, 4))
    if patched:
        model[0].forward = lambda x: x + 1
    signature = inspect.signature(model[0].forward)
    change(model)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied[0].weight)
    nn.init.zeros_(copied[0].bias)
    ones = torch.ones(1, 4)
    assert torch.equal(copied(ones), ones + 1 if patched else 0 * ones)
    assert not torch.equal(model(ones), 0 * ones)
    assert inspect.signature(model[0].forward) == signature


def nothing_repeats() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parallel(model, config_for(2, fsdp_auto_wrap_policy="NO_WRAP", fsdp_activation_checkpointing=True))


def test_recomputing_needs_blocks(ranks):
    with pytest.raises(
        RankError, match="name one in fsdp_transformer_layer_cls_to_wrap, with fsdp_auto_wrap_policy: T"
    ):
        ranks.run(2, nothing_repeats)


def without_blocks() -> tuple[int, float]:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model = parallel(copy.deepcopy(alone), config_for(2))
    batch = torch.ones(2, 4)
    model(batch).sum().backward()
    alone(batch).sum().backward()
    gradient = next(model.parameters()).grad.full_tensor()
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    return units, float((gradient - next(alone.parameters()).grad).abs().max())


def test_a_model_without_blocks_is_one_unit(ranks):
    for count, difference in ranks.run(2, without_blocks):
        assert count == 1
        assert difference < 1e-6


def compiled(checkpointing: bool) -> tuple[list[bool], int, int, float]:
    """(each block is compiled and a unit, how many graphs there are, how often one is broken, largest difference of
    gradients from those without compilation)."""
    gradients = []
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    for compiles in (False, True):
        settings = {"fsdp_activation_checkpointing": checkpointing, "shardkit": {"compile": compiles}}
        torch.manual_seed(0)
        found = nn.Module.compile
        nn.Module.compile = partialmethod(found, backend="eager")  # the tracing, without a C++ compiler
        try:
            model = parallel(models.Gpt(), config_for(2, **settings))
        finally:
            nn.Module.compile = found
        models.next_token_loss(model, tokens()).backward()
        gradients.append([whole(p.grad) for p in model.parameters()])
    difference = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    are_compiled = [isinstance(b, FSDPModule) and b._compiled_call_impl is not None for b in model.blocks]
    breaks = sum(counters["graph_break"].values())
    return are_compiled, counters["stats"]["unique_graphs"], breaks, difference


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_block_is_compiled_in_place_and_equal_ones_once(ranks, checkpointing):
    for blocks, graphs, breaks, difference in ranks.run(2, compiled, checkpointing):
        assert blocks == [True] * 3 and difference < 1e-6
        assert graphs < len(blocks) and breaks == 0
