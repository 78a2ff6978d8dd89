"""n ranks = one plain torch process on the same global batches: losses of 6 steps and the final weights."""

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.config.schema import Config
from shardkit.distributed import process
from shardkit.distributed.modules import unwrapped
from shardkit.optim import clip, rebind, stepping
from shardkit.sharding import precision
from shardkit.sharding.gradient_sync import gradient_sync
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize
from tests import models

STEPS, SAMPLES = 6, 8

# Weights may differ by this share of what training changed; losses by this much. fp32 differs by the order of sums;
# bf16 has 8 bits of mantissa (2^-9 = 0.2 % a rounding), so single gradients are off by per cents.
BOUNDS = {"no": (1e-5, 1e-5), "bf16": (2e-2, 0.1)}

WRAPS = {
    "class": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Block"},
    "size": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 300},
    "none": {"fsdp_auto_wrap_policy": "NO_WRAP"},
}


@dataclass(frozen=True)
class Case:
    strategy: int
    wrap: str
    mixed_precision: str
    accumulation: int
    world: int
    tied: bool

    def __str__(self) -> str:
        tied = "-tied" if self.tied else ""
        return f"{self.strategy}-{self.wrap}-{self.mixed_precision}-x{self.accumulation}-on{self.world}{tied}"

    def config(self) -> Config:
        return Config(
            num_processes=self.world,
            num_machines=2 if self.world == 4 else 1,
            use_cpu=True,
            mixed_precision=self.mixed_precision,
            fsdp_config={"fsdp_sharding_strategy": self.strategy, **WRAPS[self.wrap]},
        )


def cases() -> list[Case]:
    """Every strategy with every wrap on every world; precision, accumulation and tying alternate over them."""
    rows = [row for row in product((1, 2, 3, 4, 5), WRAPS, (1, 2, 4)) if row[0] != 3 or row[1] == "class"]
    return [
        Case(strategy, wrap, ("no", "no", "bf16")[(i + i // 3) % 3], (1, 3)[i % 2], world, i % 5 in (1, 3))
        for i, (strategy, wrap, world) in enumerate(rows)
    ]


def marked_cases() -> list[Any]:
    """The quick part takes two ranks, and blocks by their class."""
    slow = {True: [], False: [pytest.mark.slow]}
    return [pytest.param(case, id=str(case), marks=slow[case.world == 2 and case.wrap == "class"]) for case in cases()]


def build(tied: bool, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = models.Gpt(tied=tied)
    if tied:
        nn.init.normal_(model.head.weight, std=0.2)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A large epsilon, since some gradients (of the keys' bias) are zero but for rounding, and Adam would scale that up.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def batches(accumulation: int) -> list[list[torch.Tensor]]:
    """STEPS lists of micro-batches (SAMPLES, 9) of tokens, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randint(0, 19, (SAMPLES, 9), generator=generator) for _ in range(accumulation)] for _ in range(STEPS)
    ]


def numbers(model: nn.Module) -> dict[str, Any]:
    """The model's whole parameters. Collective where they are sharded."""
    whole = {fqn: p.full_tensor() if isinstance(p, DTensor) else p for fqn, p in model.named_parameters()}
    return {fqn: tensor.detach().float().numpy().copy() for fqn, tensor in whole.items()}


@cache
def reference(accumulation: int, tied: bool) -> tuple[list[float], list[float], dict[str, Any], dict[str, Any]]:
    """(losses, gradient norms, first weights, last weights) of plain torch."""
    model = build(tied, seed=0)
    optimizer = optimizer_of(model)
    first = numbers(model)
    losses, norms = [], []
    for micro_batches in batches(accumulation):
        loss = models.next_token_loss(model, torch.cat(micro_batches))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, first, numbers(model)


def train(case: Case) -> tuple[list[float], list[float], dict[str, Any]]:
    """(losses, gradient norms, last weights) of a rank; models differ at first, and rank 0's counts."""
    config = case.config()
    here = process.start(config)
    model = build(case.tied, seed=here.rank)
    optimizer = optimizer_of(model)
    names = rebind.ParameterNames.of(model)
    parallel = parallelize(model, config, build_mesh(config, here), here)
    rebind.rebind(optimizer, names, parallel)
    stepper = stepping.stepper_of(optimizer)
    losses, norms = [], []
    for micro_batches in batches(case.accumulation):
        total = torch.zeros(())
        for number, tokens in enumerate(micro_batches, 1):
            mine = tokens.chunk(here.world_size)[here.rank]
            with gradient_sync([parallel], enabled=number == len(micro_batches)):
                with precision.autocast(config, here.device):
                    loss = models.next_token_loss(parallel, mine) / len(micro_batches)
                loss.backward()
            total += loss.detach().float()
        norms.append(clip.clip_grad_norm_(parallel.parameters(), 1.0).item())
        stepper.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / here.world_size)
    return losses, norms, numbers(unwrapped(parallel))


def distance(weights: dict[str, Any], others: dict[str, Any]) -> float:
    return float(numpy.sqrt(sum(((weights[fqn] - others[fqn]) ** 2).sum() for fqn in others)))


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("case", marked_cases())
def test_ranks_train_as_one_process(ranks, case):
    losses, norms, first, last = reference(case.accumulation, case.tied)
    loss_bound, weight_bound = BOUNDS[case.mixed_precision]
    results = ranks.run(case.world, train, case)
    for found_losses, found_norms, weights in results:
        assert found_losses == pytest.approx(losses, abs=loss_bound)
        assert found_norms == pytest.approx(norms, rel=10 * loss_bound)
        assert weights.keys() == last.keys()
        assert distance(weights, last) <= weight_bound * distance(first, last)
    assert all(results[0][0] == other[0] for other in results)
