"""Ranks that use different modules of a model in a step: found, or right where that is asked for."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.errors import ModelError, ShardkitError, UsageError
from shardkit.sharding.fsdp.shard_model import can_reduce_unused
from tests.agreement import compared_often
from tests.loops.net import Part
from tests.ranks import log_lines


class Branches(nn.Module):
    """Two branches of equal shape. `inside`: both in one unit; else each is a unit."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left, self.right = (nn.Linear(6, 6), nn.Linear(6, 6)) if inside else (Part(6), Part(6))

    def forward(self, x: torch.Tensor, goes_left: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.left(x) if goes_left else self.right(x)


def config(strategy: int, unused: bool = False, debug: bool = False, unit: str | None = None) -> Config:
    """`unit`: the class that is wrapped; None: one unit."""
    wrapping: dict[str, Any] = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    if unit:
        wrapping = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": unit}
    return Config(
        use_cpu=True,
        num_processes=dist.get_world_size(),
        debug=debug,
        fsdp_config={"fsdp_sharding_strategy": strategy, **wrapping},
        shardkit={
            "ddp_find_unused_parameters": unused,
            "mesh": {"replicate_size": 2, "shard_size": 2} if strategy == 4 else {},
        },
    )


def step(accelerator: Accelerator, model: Any, optimizer: Any, number: int, goes_left: bool) -> torch.Tensor:
    data = torch.randn(12, 6, generator=torch.Generator().manual_seed(number))
    loss = model(data.chunk(dist.get_world_size())[dist.get_rank()], goes_left).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@compared_often()
def different_branches(strategy: int, first: int) -> tuple[int, str]:
    """The step in which ranks that take different branches from step `first` on get an error, and the error."""
    accelerator = Accelerator(config=config(strategy))
    torch.manual_seed(0)
    model = Branches(inside=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    number = -1
    try:
        for number in range(500):
            goes_left = dist.get_rank() == 0 if number >= first else True
            step(accelerator, model, optimizer, number, goes_left)
    except ShardkitError as error:
        return number, str(error)
    return -1, ""


@pytest.mark.parametrize("first", [0, 1])
def test_different_branches_of_equal_shape_are_refused_before_the_first_steps(ranks, first):
    for number, text in ranks.run(2, different_branches, 1, first):
        assert number == first
        assert text.startswith("model: rank 1 used other modules or parameters than rank 0 in a step, and FSDP mixes")
        assert "the weights have not been changed by this step" in text
        assert "shardkit.ddp_find_unused_parameters: true" in text


class Holder(nn.Sequential):
    """A model whose only child has the branches."""

    def forward(self, x: torch.Tensor, goes_left: bool) -> torch.Tensor:
        return self[0](x, goes_left)


def branches_that_are_units(unit: str | None) -> tuple[list[float], str]:
    """Losses of three steps with other branches on each rank, where a class is the unit, and the error."""
    torch.manual_seed(0)
    model, losses = Holder(Branches(inside=False)), []
    accelerator = Accelerator(config=config(1, unused=True, unit=unit))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for number in range(3):
            loss = step(accelerator, model, optimizer, number, goes_left=dist.get_rank() == 0)
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    except ModelError as error:
        return losses, str(error)
    return losses, ""


@pytest.mark.skipif(not can_reduce_unused(), reason="FSDP reduces unused parameters from torch 2.13 on")
def test_units_that_a_rank_leaves_out_are_refused_and_the_advice_for_them_works(ranks):
    for losses, text in ranks.run(2, branches_that_are_units, "Part"):
        assert not losses and "name the class around them in fsdp_transformer_layer_cls_to_wrap" in text
    by_class, whole = (ranks.run(2, branches_that_are_units, unit) for unit in ("Branches", None))
    for (losses, text), (expected, _) in zip(by_class, whole, strict=True):
        assert losses == pytest.approx(expected) and len(losses) == 3 and not text


class Experts(nn.Module):
    """Of which a rank uses as many as its number, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(6, 6), nn.ModuleList(Part(6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return sum(expert(x) for expert in self.experts[: dist.get_rank() + 1])


def other_numbers_of_experts(strategy: int, unused: bool, unit: str | None) -> str:
    accelerator = Accelerator(config=config(strategy, unused, unit=unit))
    model = accelerator.prepare(Experts())
    before = [value.full_tensor() for value in model.state_dict().values()]
    with pytest.raises(ModelError) as found:
        accelerator.backward(model(torch.ones(2, 6)).square().mean())
    after = [value.full_tensor() for value in model.state_dict().values()]
    assert all(map(torch.equal, before, after))
    return str(found.value)


@pytest.mark.parametrize(
    ("strategy", "unused", "unit"),
    [(1, False, "Part"), (2, False, "Part"), (1, False, None), (1, True, "Part")],
)
def test_other_numbers_of_modules_are_refused_before_they_are_gathered(ranks, strategy, unused, unit):
    """Collectives of different sizes would end a process of gloo, and be waited for on GPUs."""
    if unused and not can_reduce_unused():
        pytest.skip("FSDP reduces unused parameters from torch 2.13 on")
    for text in ranks.run(3, other_numbers_of_experts, strategy, unused, unit):
        assert text.startswith("model: rank") and "used other modules or parameters than rank 0 in a step" in text
        assert "name the class around them" in text


@compared_often()
def later_branches() -> tuple[int, str]:
    """As above, in a loop over data, which is where boundaries are."""
    accelerator = Accelerator(config=config(1))
    model = Branches(inside=True)
    loader = torch.utils.data.DataLoader(torch.zeros(4000, 1), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    number = -1
    try:
        for number, _ in enumerate(loader):
            step(accelerator, model, optimizer, number, dist.get_rank() == 0 if number >= 10 else True)
    except ModelError as error:
        return number, str(error)
    return -1, ""


def test_different_branches_in_a_later_step_are_noticed_soon(ranks):
    one, other = ranks.run(2, later_branches)
    assert one == other
    assert one[0] >= 10
    assert "weights are wrong since then, so go back to an earlier checkpoint" in one[1]


def saved_after_different_branches(folder: Path) -> list[str]:
    """What each save says, where ranks have taken different branches in the last step."""
    accelerator = Accelerator(config=config(1))
    model = Branches(inside=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(4):
        step(accelerator, model, optimizer, number, number < 3 or dist.get_rank() == 0)
    said = []
    for save in (accelerator.save_state, lambda path: accelerator.save_model(model, path)):
        with pytest.raises(ModelError) as refused:
            save(folder)
        said.append(str(refused.value))
    accelerator.free_memory()
    return said


def test_weights_of_different_branches_are_not_saved(ranks, tmp_path):
    """Also where a run is too short for the comparison in the background."""
    for said in ranks.run(2, saved_after_different_branches, tmp_path / "saved"):
        assert all("rank 1 used other modules or parameters than rank 0" in text for text in said)
        assert all("go back to an earlier checkpoint" in text for text in said)
    assert not (tmp_path / "saved").exists()


def allowed(strategy: int) -> tuple[list[float], dict[str, Any]]:
    """Losses over all ranks and last weights, where ranks may use different parameters."""
    accelerator = Accelerator(config=config(strategy, unused=True))
    torch.manual_seed(0)
    model = Branches(inside=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    losses = []
    for number in range(5):
        loss = step(accelerator, model, optimizer, number, (dist.get_rank() + number) % 2 == 0)
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    state = accelerator.get_state_dict(model)
    return losses, {name: tensor.tolist() for name, tensor in state.items()}


@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_where_it_is_asked_for_ranks_may_use_different_parameters(ranks, strategy):
    if strategy != 3 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("FSDP reduces unused parameters from torch 2.13 on")
    torch.manual_seed(0)
    model = Branches(inside=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number in range(5):
        parts = torch.randn(12, 6, generator=torch.Generator().manual_seed(number)).chunk(2)
        outputs = [model(part, (rank + number) % 2 == 0) for rank, part in enumerate(parts)]
        loss = sum(output.pow(2).mean() for output in outputs) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for rank, (found, weights) in enumerate(ranks.run(2, allowed, strategy)):
        assert found == pytest.approx(losses, abs=1e-5)
        if rank == 0:
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(torch.tensor(weights[name]), tensor, atol=1e-5, rtol=1e-4)


SIDES = ["ll", "ll", "rr", "ll", "lr", "rr", "rr", "rr", "ll", "ll", "rr", "lr"]
"""The branches of even and of odd ranks in each micro-batch: in some steps no rank uses one of them."""


def parts_of(number: int, world: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(number)).chunk(world)


def loss_of_one(model: nn.Module, part: torch.Tensor, side: str, number: int) -> torch.Tensor:
    loss = model(part, side == "l").pow(2).mean()
    return loss + 0.1 * model.left.weight.abs().sum() if number == 7 else loss  # a penalty on what nobody uses


def with_a_branch_that_no_rank_uses(strategy: int, window: int) -> dict[str, Any]:
    accelerator = Accelerator(config=config(strategy, unused=True), gradient_accumulation_steps=window)
    torch.manual_seed(0)
    model = Branches(inside=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5))
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, sides in enumerate(SIDES):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of_one(model, parts_of(number, world)[rank], sides[rank % 2], number))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.tolist() for name, tensor in accelerator.get_state_dict(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("strategy", "world"), [(1, 2), (2, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_what_no_rank_uses_has_no_gradient(ranks, strategy, world, window):
    """Momentum and weight decay leave it as it is, as in one process."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("FSDP reduces unused parameters from torch 2.13 on")
    torch.manual_seed(0)
    model = Branches(inside=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for number, sides in enumerate(SIDES):
        for rank, part in enumerate(parts_of(number, world)):
            (loss_of_one(model, part, sides[rank % 2], number) / world / window).backward()
        if (number + 1) % window == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    weights = ranks.run(world, with_a_branch_that_no_rank_uses, strategy, window)[0]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(weights[name]), tensor, atol=1e-5, rtol=1e-4)


def first_step_without_gradients() -> list[str]:
    with log_lines(level=logging.WARNING) as lines:
        accelerator = Accelerator(config=config(1))
        model = Branches(inside=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            torch.zeros(1, requires_grad=True).sum().backward()  # a loss that is not the model's
            optimizer.step()
    return lines


def test_a_first_step_without_any_gradient_is_told_once(ranks):
    for texts in ranks.run(2, first_step_without_gradients):
        assert len(texts) == 1
        assert texts[0].startswith("optimizer: no parameter had a gradient in the first step of SGD (6 parameters)")


class Consuming(torch.optim.SGD):
    """Drops the gradients in its step, to free their memory."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        super().zero_grad()


def first_step_that_drops_gradients() -> list[str]:
    with log_lines(level=logging.WARNING) as lines:
        model = nn.Linear(3, 3)
        accelerator = Accelerator(config=config(3))
        model, optimizer = accelerator.prepare(model, Consuming(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
    return lines


def test_an_optimizer_may_drop_the_gradients_in_its_step(ranks):
    assert ranks.run(1, first_step_that_drops_gradients) == [[]]


def evaluates_alone(strategy: int, kind: str) -> str:
    """What rank 0 is told of an evaluation that only it makes, after steps that all make."""
    ranks = dist.get_world_size()
    launch = {"process_group_timeout_s": 4.0}
    sharding = {"fsdp_sharding_strategy": strategy}
    accelerator = Accelerator(
        config=Config(use_cpu=True, num_processes=ranks, fsdp_config=sharding, shardkit={"launch": launch})
    )
    model = accelerator.prepare(nn.Sequential(Part(6), Part(6)))
    x = torch.ones(2, 6)
    for _ in range(3):
        accelerator.backward(model(x).sum())
    if kind == "all":
        for _ in range(3):
            with torch.no_grad():
                model(x)
    elif accelerator.is_main_process:
        with torch.inference_mode() if kind == "inference" else torch.no_grad(), pytest.raises(UsageError) as told:
            model(x)
        return str(told.value)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [(1, "no_grad"), (2, "inference"), (1, "all")])
def test_an_evaluation_that_only_rank_0_makes_is_told_and_meets_no_training_step(ranks, strategy, kind):
    told = ranks.run(2, evaluates_alone, strategy, kind)
    expected = "Sequential.forward(no_grad): rank 1 has not come after 4 s; every rank must call it"
    assert told[1] == "" and told[0].startswith("" if kind == "all" else expected)
    assert (told[0] == "") is (kind == "all") and ("accelerator.unsharded(model)" in told[0]) is (kind != "all")


def evaluates_its_whole_model(local_rank: str) -> str:
    """The strategy of a run in which rank 0 alone evaluates: each of the machines has one rank."""
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK=local_rank)
    settings = {"use_cpu": True, "num_machines": 2, "distributed_type": "FSDP"}
    launch = {"process_group_timeout_s": 4.0}
    sharding = {"fsdp_sharding_strategy": "HYBRID_SHARD"}
    accelerator = Accelerator(config={**settings, "fsdp_config": sharding, "shardkit": {"launch": launch}})
    model = accelerator.prepare(nn.Sequential(Part(6), Part(6)))
    if accelerator.is_main_process:
        with torch.no_grad():
            model(torch.ones(2, 6))
    accelerator.backward(model(torch.ones(2, 6)).sum())
    return str(next(model.parameters()).device_mesh.shape)


def test_a_rank_that_has_the_whole_model_may_evaluate_alone(ranks):
    assert ranks.run(2, evaluates_its_whole_model, "0") == ["(2, 1)"] * 2
