"""The cut of random models: what a plan counts is what a run shards."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.config.schema import Config
from shardkit.distributed import process
from shardkit.errors import ModelError
from shardkit.model.live import tree_of
from shardkit.plan.unit_sizes import layout
from shardkit.sharding.fsdp import internals
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize

Cut = dict[str, int] | str
MODELS = 25


class Part(nn.Module):
    """A block of a random model; not meant to run."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        width = draw.choice([3, 4, 5])
        self.inner = nn.ModuleList(leaf(draw, width, depth) for _ in range(draw.randint(1, 3)))
        if draw.random() < 0.2:
            self.scale = nn.Parameter(torch.ones(()))


def leaf(draw: random.Random, width: int, depth: int) -> nn.Module:
    if depth and draw.random() < 0.4:
        return Part(draw, depth - 1)
    kinds = (nn.Linear(width, width), nn.BatchNorm1d(width), nn.LayerNorm(width), nn.Embedding(5, width))
    return draw.choice(kinds)


def random_model(draw: random.Random) -> nn.Module:
    """Blocks, some in a list and some outside; shared parameters and modules, frozen parts, mixed dtypes."""
    model = nn.Module()
    model.embed = nn.Embedding(7, 4)
    model.blocks = nn.ModuleList(Part(draw, draw.randint(0, 2)) for _ in range(draw.randint(0, 4)))
    model.beside = Part(draw, 1)
    model.head = nn.Linear(4, 7, bias=False)
    modules = [module for module in model.modules() if module is not model]
    if draw.random() < 0.4:
        model.head.weight = model.embed.weight
    if len(model.blocks) > 1 and draw.random() < 0.4:
        model.blocks[-1].inner[0] = model.blocks[0].inner[0]
    if draw.random() < 0.4:
        draw.choice(modules).requires_grad_(False)
    if draw.random() < 0.3:
        model.to(torch.bfloat16)
    if draw.random() < 0.3:
        draw.choice(modules).to(draw.choice([torch.bfloat16, torch.float64]))
    return model


def random_config(draw: random.Random, world_size: int) -> Config:
    wrap = draw.choice(
        [
            {"fsdp_transformer_layer_cls_to_wrap": "Part"},
            {"fsdp_transformer_layer_cls_to_wrap": "Part,Embedding"},
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": draw.choice([10, 40, 100])},
            {"fsdp_auto_wrap_policy": "NO_WRAP"},
            {},
        ]
    )
    ignored = draw.choice([None, None, "head", r"blocks\.0", r"beside\.inner\..*"])
    return Config(
        use_cpu=True,
        num_processes=world_size,
        mixed_precision=draw.choice(["no", "bf16"]),
        fsdp_config={"fsdp_sharding_strategy": draw.choice([1, 2]), "fsdp_ignored_modules": ignored, **wrap},
    )


def planned_and_run(seed: int) -> tuple[Cut, Cut]:
    """Parameters in each unit, as the plan counts them and as FSDP2 manages them; or what is said of the model."""
    draw = random.Random(seed)
    model, config = random_model(draw), random_config(draw, dist.get_world_size())
    return planned(model, config), run(model, config)


def planned(model: nn.Module, config: Config) -> Cut:
    try:
        found = layout(tree_of(model), config, dist.get_world_size(), dist.get_world_size(), "adamw")
    except ModelError as error:
        return str(error)
    return {unit.fqn: unit.numel for unit in (*found.units, found.root) if unit.numel}


def run(model: nn.Module, config: Config) -> Cut:
    here = process.start(config)
    try:
        sharded = parallelize(model, config, build_mesh(config, here), here)
    except ModelError as error:
        return str(error)
    names = {id(module): fqn for fqn, module in reversed(list(sharded.named_modules(remove_duplicate=False)))}
    found = {}
    for state in internals.states_of(sharded):
        numel = sum(p.sharded_param.numel() for group in internals.groups_of(state) for p in group.fsdp_params)
        if numel:
            found[names[id(state._modules[0])]] = numel
    return found


@pytest.mark.parametrize("first", range(0, 4 * MODELS, MODELS))
@pytest.mark.slow
def test_the_plan_cuts_a_model_as_the_run_does(ranks, first):
    kinds = set()
    for seed in range(first, first + MODELS):
        for expected, found in ranks.run(2, planned_and_run, seed):
            assert found == expected, f"random model {seed}"
            kinds.add(type(found))
    assert dict in kinds
