"""Values drawn for sharded tensors on the CPU are those that one process draws for the whole ones."""

from typing import Any

import pytest
import torch
from torch import nn

from shardkit import Accelerator
from tests import loops
from tests.loops.run import WHOLE, Loop, whole

DRAWS: dict[str, Any] = {
    "normal_": lambda p: p.normal_(),
    "by a generator": lambda p: p.uniform_(generator=torch.Generator().manual_seed(3)),
    "exponential_": lambda p: p.exponential_(),
    "log_normal_": lambda p: p.log_normal_(),
    "cauchy_": lambda p: p.cauchy_(),
    "geometric_": lambda p: p.geometric_(0.3),
    "random_": lambda p: p.random_(),
    "random_ below": lambda p: p.random_(9),
    "random_ between": lambda p: p.random_(3, 9),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "bernoulli_ by values": lambda p: p.bernoulli_(p.detach().abs().clamp(max=1)),
    "bernoulli": lambda p: torch.bernoulli(p.abs().clamp(max=1)),
    "bernoulli by a number": lambda p: torch.bernoulli(p, 0.5),
    "poisson": lambda p: torch.poisson(9 * p.abs()),
    "normal by means": lambda p: torch.normal(p, 0.1),
    "normal by deviations": lambda p: torch.normal(0.5, p.abs()),
    "normal by both": lambda p: torch.normal(p, p.abs()),
    "dropout": lambda p: torch.nn.functional.dropout(p, 0.3),
    "dropout as devices have it": lambda p: torch.native_dropout(p, 0.3, True)[0],
    "noise on a norm": lambda p: torch.rand_like(p.norm()),
    "a norm's coin": lambda p: torch.bernoulli(p.norm() / (1 + p.norm())),
}


def drawn(strategy: int | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = nn.Linear(5, 7)
    if strategy is not None:
        config = loops.config_of(strategy, Loop(lambda _: None, fsdp=WHOLE))
        model = Accelerator(config=config).prepare(model)
    found = {}
    for name, draw in DRAWS.items():
        torch.manual_seed(1)
        with torch.no_grad():
            found[name] = whole(draw(model.weight.detach().clone())).double().cpu().numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), [(2, 1), (3, 2), (4, 4)])
def test_drawn_values_are_those_of_one_process(ranks, world, strategy):
    expected = drawn(None)
    for found in ranks.run(world, drawn, strategy):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, abs=1e-6), name
