"""`copy.deepcopy` of a sharded model, or of a part of it, is a plain one with the whole weights."""

import copy
import io
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardkit import Accelerator
from shardkit.errors import UsageError

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.norm(self.inner(x)))


class Net(nn.Module):
    """A first layer that shares its weight with the last one, blocks, a recurrent layer, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.recurrent, self.last = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.decode(self.recurrent(x[:, None])[0][:, 0])

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x)


def twice(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward that a script sets on a block."""
    return 2 * type(module).forward(module, x)


class Loop:
    """A loop with a model and an optimizer: sharded if `settings` are given, else plain, on the samples of all ranks.
    The script has changed the model: a forward, a hook, an attribute."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.model, self.calls = Net(), 0
        self.model.blocks[1].forward = MethodType(twice, self.model.blocks[1])
        self.model.register_forward_hook(self.count)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), 0.1)
        self.accelerator = None
        if settings is not None:
            self.accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True, **settings})
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.accelerator.register_forward_method(self.model, "decode")
        self.model.blocks[0].scale = 0.5

    def __deepcopy__(self, memo: Any) -> "Loop":
        return self  # of a bound hook, as of any bound method, deepcopy copies the object

    def count(self, *_: Any) -> None:
        self.calls += 1

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        loss = self.model(torch.randn(4, WIDTH)).float().square().mean()
        self.accelerator.backward(loss) if self.accelerator else loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def copied(settings: dict[str, Any] | None) -> list[torch.Tensor]:
    """What a script does with copies: the best model, an average, a frozen part, a second model that is trained."""
    loop, x = Loop(settings), torch.ones(4, WIDTH)
    model = loop.model
    average = None
    for step in range(3):
        loop.step(step)
        if step == 1:
            best = copy.deepcopy(model)
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if average is not None:
            average.update_parameters(model)
    part = copy.deepcopy(model.blocks[1]).eval()
    assert all(type(p) is nn.Parameter and p.is_leaf for p in [*best.parameters(), *part.parameters()])
    assert best.first.weight is best.last.weight and type(best) is Net and type(best.blocks[0]) is Block
    pickle.dumps(best.state_dict())
    found = [one.detach().clone() for one in (*best.state_dict().values(), *average.module.parameters())]
    best.eval()
    calls = loop.calls
    if not dist.is_initialized() or dist.get_rank() == 0:  # no rank needs another one
        with torch.no_grad():
            found += [best(x), best.decode(x), part(x)]
        torch.save(part.state_dict(), io.BytesIO())
    else:
        found += [torch.zeros(4, WIDTH)] * 3
        loop.calls += 1
    assert loop.calls == calls + 1, "the script's hook is called for the copy, too"
    second, optimizer = best.train(), torch.optim.SGD(best.parameters(), 0.1)
    if loop.accelerator:
        second, optimizer = loop.accelerator.prepare(second, optimizer)
    loss = second(x).float().square().mean()
    loop.accelerator.backward(loss) if loop.accelerator else loss.backward()
    optimizer.step()
    model.load_state_dict(copy.deepcopy(second).state_dict())
    return [one.detach().float() for one in [*found, *copy.deepcopy(model).state_dict().values()]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 1e-6),
        ({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "shardkit": {"recompute": "blocks"}}, 1e-6),
        ({"fsdp_config": {"fsdp_offload_params": True}}, 1e-6),
        pytest.param({"mixed_precision": "bf16"}, 0.03, marks=pytest.mark.slow),
        pytest.param({"shardkit": {"compile": True}}, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_copies_are_those_of_a_plain_model(ranks, settings, tolerance):
    plain = copied(None)
    for rank, found in enumerate(ranks.run(2, copied, settings)):
        for own, expected in zip(found, plain, strict=True):
            if rank == 0 or own.any():
                torch.testing.assert_close(own, expected, rtol=tolerance, atol=tolerance)


def converted(is_sharded: bool) -> torch.Tensor:
    """The output in fp64 of a copy. The model has a parametrized weight, and a hook from a module without a name."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    made: dict[str, Any] = {}
    exec("def threefold(module, given, output): return 3 * output", made)
    model[0].register_forward_hook(made["threefold"])
    if is_sharded:
        model = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True}).prepare(model)
        with pytest.raises(UsageError, match="parameters that are copied before their model stay sharded"):
            copy.deepcopy([*model.parameters(), model])
    copied = copy.deepcopy(model).double()
    assert type(copied[0]).__name__ == "ParametrizedLinear" and "_apply" not in vars(copied)
    return copied(torch.ones(4, WIDTH, dtype=torch.float64)).detach()


def test_a_copy_can_be_converted(ranks):
    expected = converted(False)
    for found in ranks.run(2, converted, True):
        torch.testing.assert_close(found, expected)


def of_rank_0() -> str:
    """What rank 0 is told of a copy that only it makes."""
    loop = Loop({"shardkit": {"launch": {"process_group_timeout_s": 3.0}}})
    if dist.get_rank() != 0:
        return ""
    with pytest.raises(UsageError) as told:
        copy.deepcopy(loop.model)
    return str(told.value)


@pytest.mark.slow
def test_a_copy_that_only_rank_0_makes_is_told(ranks):
    told = ranks.run(2, of_rank_0)[0]
    assert told.startswith("copy.deepcopy: rank 1 has not come after 3 s; every rank must call it"), told
