"""Stacked experts: fewer of them than ranks, so they are split on another dim. n ranks = one process, saved and loaded
over other numbers of ranks, where the dim differs."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import Accelerator
from shardkit.checkpoint.commands import merge
from shardkit.checkpoint.files import manifest
from shardkit.checkpoint.files.verify import Checkpoint
from shardkit.config.schema import Config, FsdpConfig
from shardkit.model.cut import shard_dim
from shardkit.model.describe import ModelDescription
from shardkit.model.live import tree_of
from shardkit.plan import worker
from shardkit.plan.answer import PlanRequest, row
from shardkit.plan.closed_form import estimate
from shardkit.plan.devices import DEVICES
from shardkit.plan.notes import undivided
from shardkit.runtime.checkpoints import saving
from shardkit.sharding.init import init_empty_weights

WIDTH, EXPERTS, SAMPLES, STEPS = 12, 2, 12, 4


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((8, 4096, 14336), 8, 0),  # one expert a rank
        ((8, 4096, 14336), 64, 1),
        ((8, 14336, 4096), 7 * 2**11, 1),
        ((8, 4096, 14336), 7 * 2**11, 2),
        ((8, 4096, 14336), 5, 0),  # uneven, as ever
        ((8, 5, 7), 16, 0),  # nothing divides evenly
        ((1, 1, 768), 6, 2),
        ((1, 16), 1, 1),  # one row: DTensor cannot flatten along a dim of size 1
        ((4,), 8, 0),
        ((), 8, 0),
        ((0, 8), 4, 0),
        ((2, 0), 4, 0),
    ],
)
def test_the_dim_that_a_parameter_is_split_on(shape, shards, dim):
    assert shard_dim(shape, shards) == dim


class Experts(nn.Module):
    """Two experts, each token goes to one. On 3 and 4 ranks `up` is split on dim 1 or 2, `down` on another, `bias` on
    dim 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, 5, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, 5))
        self.bias = nn.Parameter(torch.empty(EXPERTS, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.up, self.down, self.bias):
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        hidden = torch.einsum("bw,ehw->beh", x, self.up) + self.bias
        every = torch.einsum("beh,ewh->bew", torch.relu(hidden), self.down)
        return x + weight[:, None] * every[torch.arange(len(x)), chosen]


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1, WIDTH))
        self.blocks = nn.ModuleList([Experts() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.start
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def started(**fsdp: Any) -> Accelerator:
    wrap = {"fsdp_transformer_layer_cls_to_wrap": "Experts", **{f"fsdp_{key}": value for key, value in fsdp.items()}}
    given = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": wrap, "shardkit": {"seed": 3}}
    return Accelerator(config=given)


def built(optimizer: Any = torch.optim.AdamW, **fsdp: Any) -> Any:
    accelerator = started(**fsdp)
    torch.manual_seed(0)
    model = Mixture()
    return accelerator, *accelerator.prepare(model, optimizer(model.parameters(), lr=0.01))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(1, keepdim=True).sin()


def train(run: Any, steps: range) -> list[float]:
    """The norms of the gradients, before they are clipped."""
    accelerator, model, optimizer = run
    norms = []
    for step in steps:
        inputs, wanted = (part.chunk(accelerator.num_processes)[accelerator.process_index] for part in data(step))
        accelerator.backward((model(inputs) - wanted).square().mean())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def numbers(model: nn.Module) -> dict[str, Any]:
    whole = {fqn: p.full_tensor() if isinstance(p, DTensor) else p for fqn, p in model.named_parameters()}
    return {fqn: tensor.detach().numpy().copy() for fqn, tensor in whole.items()}


@cache
def in_one_process(optimizer: Any = torch.optim.AdamW, steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = Mixture()
    stepping = optimizer(model.parameters(), lr=0.01)
    norms = []
    for step in range(steps):
        inputs, wanted = data(step)
        (model(inputs) - wanted).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        stepping.step()
        stepping.zero_grad()
    return norms, numbers(model)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for fqn, value in expected.items():
        numpy.testing.assert_allclose(found[fqn], value, rtol=2e-4, atol=2e-6, err_msg=fqn)


def trained(strategy: int, optimizer: Any) -> tuple[list[float], dict[str, Any], dict[str, int]]:
    run = built(optimizer, sharding_strategy=strategy)
    norms = train(run, range(STEPS))
    dims = {fqn: p.placements[-1].dim for fqn, p in run[1].named_parameters() if isinstance(p, DTensor)}
    return norms, numbers(run[1]), dims


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy", "optimizer"),
    [
        (2, 1, torch.optim.AdamW),
        (3, 1, torch.optim.AdamW),
        (4, 2, torch.optim.AdamW),
        (4, 1, torch.optim.Adafactor),  # needs whole tensors
    ],
    ids=str,
)
def test_ranks_train_as_one_process(ranks, world, strategy, optimizer):
    norms, expected = in_one_process(optimizer)
    for found, weights, dims in ranks.run(world, trained, strategy, optimizer):
        assert found == pytest.approx(norms, rel=1e-4)
        assert_close(weights, expected)
        assert dims["blocks.0.up"] == {2: 0, 3: 2, 4: 2}[world]
        assert dims["blocks.0.down"] == {2: 0, 3: 1, 4: 1}[world]
        assert dims["blocks.0.bias"] == 0
        assert dims["start"] == 1


def saved(project: Any, kind: str) -> dict[str, Any]:
    run = built(state_dict_type=kind)
    train(run, range(2))
    run[0].save_state(project / "state")
    run[0].save_model(run[1], project / "model")
    saving.close(run[0]._run)
    return numbers(run[1])


def resumed(project: Any) -> dict[str, Any]:
    run = built()
    run[0].load_state(project / "state")
    train(run, range(2, STEPS))
    saving.close(run[0]._run)
    return numbers(run[1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "on", "then"), [("SHARDED", 4, 2), ("SHARDED", 1, 4), ("FULL", 3, 1)])
def test_a_checkpoint_goes_on_where_experts_are_split_otherwise(ranks, tmp_path, kind, on, then):
    at_save = ranks.run(on, saved, tmp_path, f"{kind}_STATE_DICT")[0]
    _, expected = in_one_process()
    for found in ranks.run(then, resumed, tmp_path):
        assert_close(found, expected)
    merge.merge(Checkpoint(tmp_path / "state", manifest.read(tmp_path / "state")), tmp_path / "merged")
    for folder in ("merged", "model"):
        exported = load_file(tmp_path / folder / "model.safetensors")
        assert {name: value.numpy().tolist() for name, value in exported.items()} == {
            name: value.tolist() for name, value in at_save.items()
        }


def filled(file: Any) -> tuple[dict[str, Any], ...]:
    """From a file, each rank reading its part; by their own initialisation; from a whole state dict."""
    found = []
    for weights in (file, None):
        accelerator = started()
        with init_empty_weights():
            model = Mixture()
        model.start = nn.Parameter(torch.full((1, WIDTH), 2.0))
        model = accelerator.prepare(model, weights=weights)
        found.append(numbers(model))
    model.load_state_dict(load_file(file))
    found.append(numbers(model))
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel()).view(parameter.shape).float()
    return *found, numbers(model)


@pytest.mark.slow
def test_values_come_in_whole_and_each_rank_keeps_its_part(ranks, tmp_path):
    torch.manual_seed(5)
    model = Mixture()
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    counted = {name: numpy.arange(value.numel()).reshape(value.shape) for name, value in values.items()}
    first: dict[str, Any] = {}
    for world in (1, 3, 4):
        for by_file, by_itself, by_dict, by_data in ranks.run(world, filled, tmp_path / "model.safetensors"):
            first = first or by_itself
            for found, expected in ((by_file, values), (by_dict, values), (by_itself, first), (by_data, counted)):
                assert all(numpy.array_equal(found[name], expected[name]) for name in expected)


def rows() -> torch.Tensor:
    return torch.zeros(SAMPLES, WIDTH)


@pytest.mark.slow
def test_the_plan_splits_as_training_does():
    """By formula and simulated: a rank's parts, what it gathers, and the bytes of every collective."""
    tree = tree_of(Mixture())
    config = Config(num_processes=4, fsdp=FsdpConfig(transformer_layer_cls_to_wrap=["Experts"]))
    found = estimate(tree, config, world_size=4)
    job = worker.Job("factory", f"{__name__}:Mixture", [], 4, 4, "adamw", f"{__name__}:rows", 1, None, is_exact=True)
    step, _ = worker.simulated(job, config)
    last = step.moments[-1].memory
    assert last.parameters == found.memory.timeline[-1].memory.parameters
    assert last.gradients == found.memory.timeline[-1].memory.gradients
    expected = {each.kind: each.payload_bytes for each in found.traffic.collectives}
    assert step.payload_bytes == expected
    formula = {moment.text: moment.memory.gathered for moment in found.memory.timeline}
    shown = {moment.text: moment.memory.gathered for moment in step.moments}
    for moment in ("loss", "backward of blocks.1", "backward of blocks.0", "backward of the root"):
        assert shown[moment] == formula[moment], moment


@cache
def many_experts() -> ModelDescription:
    """8 experts of 1.5 GiB, as a model of 2 blocks has them."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)))
        for block in model:
            block.experts = nn.Parameter(torch.empty(8, 3 * 2**13, 2**13))
    return ModelDescription("many", "Many", tree_of(model))


def test_more_ranks_than_experts_need_less():
    config = Config(num_processes=8)
    request = PlanRequest(many_experts(), config, 8, 8, DEVICES["h100-80"], batch_size=1)
    parameters = [row(replace(request, world_size=n)).memory.peak.parameters for n in (8, 64, 2**13)]
    assert parameters[0] == pytest.approx(8 * parameters[1], rel=1e-4)
    assert parameters[1] == pytest.approx(128 * parameters[2], rel=1e-3)
    assert undivided(request) is None
    assert undivided(replace(request, world_size=2**13)) is None
    assert undivided(replace(request, world_size=2**13 + 1)) == (
        "0.experts (8, 24576, 8192) cannot be sharded evenly over 8,193 ranks on any dim: 8 ranks hold all of it, and "
        "gathered parameters are padded."
    )
