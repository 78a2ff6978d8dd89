"""Activation offload: the same gradients, what is copied, and the plan's numbers for it."""

from typing import Any

import pytest
import torch
from torch import nn

from shardkit.config.checks import problems
from shardkit.config.schema import Config, FsdpConfig, ShardkitConfig
from shardkit.distributed import process
from shardkit.distributed.modules import unwrapped
from shardkit.model import gpt
from shardkit.plan import worker
from shardkit.plan.closed_form import estimate
from shardkit.sharding import offload
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize
from tests import models

SPEC = "gpt:layers=12,hidden=64,heads=4,vocab=500,seq=64"
SHAPE = gpt.parse(SPEC.removeprefix("gpt:"))
MODES = [(1, False), (1, True), (2, False), (3, True)]


def gradients(strategy: int, recomputes: bool, offloads: bool) -> list[Any]:
    config = Config(
        num_processes=2,
        use_cpu=True,
        fsdp=FsdpConfig(sharding_strategy=strategy, activation_checkpointing=recomputes),
        shardkit=ShardkitConfig(offload_activations=offloads),
    )
    here = process.start(config)
    torch.manual_seed(0)
    model = parallelize(models.Gpt(width=24, dropout=0.3), config, build_mesh(config, here), here)
    torch.manual_seed(here.rank)
    tokens = torch.randint(0, 19, (4, 17))
    for _ in range(2):  # the second backward adds to the first
        models.next_token_loss(model, tokens).backward()
    with torch.no_grad():
        model(tokens)
    whole = [p.grad.full_tensor() if strategy != 3 else p.grad for p in unwrapped(model).parameters()]
    return [gradient.numpy().copy() for gradient in whole]


def both_ways() -> bool:
    return all(
        (a == b).all() for mode in MODES for a, b in zip(gradients(*mode, False), gradients(*mode, True), strict=True)
    )


@pytest.mark.slow
def test_gradients_are_the_same_to_the_bit(ranks):
    assert ranks.run(2, both_ways) == [True, True]


class Twice(nn.Module):
    """Two operators save one tensor, a third a view of the weight; one result is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()  # saves its result
        z = y.sin() + y.cos() + x @ self.weight.t()
        return z.mul_(2).tanh()


@pytest.fixture
def copied(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of what goes to the host."""
    shapes: list[tuple[int, ...]] = []
    to_host = offload._to_host

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return to_host(tensor)

    monkeypatch.setattr(offload, "_to_host", seen)
    return shapes


def test_each_tensor_is_copied_once_and_parameters_never(copied):
    model = nn.Sequential(Twice())
    plain = nn.Sequential(Twice())
    plain.load_state_dict(model.state_dict())
    offload.offload_blocks(model)
    x = torch.randn(64, 64, requires_grad=True)
    results = []
    for one in (model, plain):
        found = torch.autograd.grad(one(x).sum(), [x, *one.parameters()], create_graph=True)
        results.append([*found, *torch.autograd.grad(found[0].square().sum(), [x])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert copied == [(4096,)] * 3  # y, x, and what tanh gave


def test_small_and_expanded_tensors_stay(copied):
    model = nn.Sequential(nn.Tanh())
    offload.offload_blocks(model)
    model(torch.randn(16, 16, requires_grad=True)).sum().backward()
    assert copied == []
    assert offload._is_expanded(torch.zeros(1, 64).expand(64, 64))
    assert not offload._is_expanded(torch.zeros(64, 1).expand(64, 1))


def simulated(**settings: Any) -> tuple[worker.Step, Any]:
    recomputes = settings.pop("recomputes", False)
    config = Config(
        num_processes=4,
        mixed_precision="bf16",
        fsdp=FsdpConfig(activation_checkpointing=recomputes),
        shardkit=ShardkitConfig(**settings),
    )
    job = worker.Job("gpt", SPEC, [], 4, 4, "adamw", None, 4, None, is_exact=False)
    closed = estimate(gpt.tree(SHAPE), config, world_size=4, facts=gpt.facts(SHAPE), batch_size=4).memory
    return worker.simulated(job, config)[0], closed


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_plan_counts_them_on_the_host(recomputes):
    kept, _ = simulated(recomputes=recomputes)
    step, closed = simulated(offload_activations=True, recomputes=recomputes)
    assert kept.host_bytes == 0
    assert step.host_bytes == pytest.approx(closed.host.activations, rel=0.02)
    peak = max(moment.memory.total for moment in step.moments)
    assert peak == pytest.approx(closed.peak.total, rel=0.05)
    assert peak < max(moment.memory.total for moment in kept.moments)


def test_what_it_does_not_go_with_is_refused():
    def texts(**settings: Any) -> list[str]:
        section = ShardkitConfig(offload_activations=True, **settings)
        return [p.text for p in problems(Config(fsdp=FsdpConfig(activation_checkpointing=True), shardkit=section))]

    assert texts() == []
    assert texts(compile=True) == ["is for blocks that are not compiled (got compile: true); write one of the two."]
    assert texts(recompute="operators") == [
        "does not reach what recompute: operators keeps (got both); write recompute: blocks, or no offload."
    ]
