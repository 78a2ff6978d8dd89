"""Muon's step, divided between the ranks, beside torch's own on whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

from shardkit.distributed.tensors import is_dtensor, local_part
from shardkit.errors import UsageError
from shardkit.optim import division
from shardkit.optim.muon_step import MuonStep
from shardkit.optim.stepping import stepper_of
from shardkit.plan.whole_steps import WholeTensor, in_step

SHAPES = [(6, 10), (10, 6), (1, 7), (7, 1), (5, 5), (3, 40), (16, 2), (4, 4)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "weight_decay": 0.0, "momentum": 0.8},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "lr": 0.02},
]


def matrices(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def stepped(parameters: list[nn.Parameter], settings: dict[str, Any], step: Any, mesh: Any = None) -> Any:
    """The whole parameters and momentum after three steps, the second of which has fewer gradients."""
    half = len(parameters) // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "weight_decay": 0.3}]
    optimizer = torch.optim.Muon(groups, **{"lr": 1e-2, **settings})
    if "lr" in settings:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor([group["lr"]])
    stepper = step(optimizer)
    for number in range(3):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * number + index))
            gradient = gradient.to(parameter.dtype)
            if is_dtensor(parameter):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = None if number == 1 and index % 3 == 0 else gradient
        stepper.step()
    buffers = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    return [[(t.full_tensor() if is_dtensor(t) else t).tolist() for t in found] for found in (parameters, buffers)]


def divided(settings: dict[str, Any], replicas: int, dim: int, dtype: torch.dtype, round_bytes: int) -> Any:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,) if replicas == 1 else (replicas, size // replicas))
    placements = [Shard(dim)] if replicas == 1 else [Replicate(), Shard(dim)]
    parameters = [nn.Parameter(distribute_tensor(value, mesh, placements)) for value in matrices(dtype)]
    parameters[-1] = nn.Parameter(matrices(dtype)[-1])  # one that every rank holds whole
    found, division.ROUND_BYTES = division.ROUND_BYTES, round_bytes
    try:

        def step(optimizer: torch.optim.Optimizer) -> Any:
            stepper = stepper_of(optimizer)
            assert isinstance(stepper, MuonStep)
            return stepper

        return stepped(parameters, settings, step)
    finally:
        division.ROUND_BYTES = found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("world_size", "replicas", "dim", "dtype", "round_bytes"),
    [
        (1, 1, 0, torch.float32, 1),
        (2, 1, 0, torch.float32, 1),
        (2, 1, 1, torch.float32, 100),
        (3, 1, 0, torch.float64, 100),
        (4, 2, 0, torch.float32, 50),
        (4, 4, 0, torch.float32, 1 << 20),
    ],
)
def test_the_values_are_those_of_torch(ranks, settings, world_size, replicas, dim, dtype, round_bytes):
    expected = stepped([nn.Parameter(value) for value in matrices(dtype)], settings, lambda optimizer: optimizer)
    for found in ranks.run(world_size, divided, settings, replicas, dim, dtype, round_bytes):
        assert found == expected


def momentum_in_bf16() -> list[list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.eye(4, 3, dtype=torch.bfloat16), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.full((4, 3), 2.0, dtype=torch.bfloat16), mesh, [Shard(0)])
    optimizer = torch.optim.Muon([parameter], momentum=0.75, nesterov=False)
    stepper_of(optimizer).step()
    return optimizer.state[parameter]["momentum_buffer"].full_tensor().tolist()


def test_orthogonalizing_leaves_the_momentum(ranks):
    """torch 2.11 divides one in bf16 by its norm, in place."""
    assert ranks.run(2, momentum_in_bf16) == [[[0.5] * 3] * 4] * 2


def with_sharded_gradient() -> list[list[float]]:
    """A matrix that every rank holds whole, beside a sharded one, after a step with a DTensor as gradient."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    parameter = nn.Parameter(torch.eye(4, 3))
    parameter.grad = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    stepper_of(torch.optim.Muon([parameter, sharded])).step()
    return parameter.tolist()


def test_a_whole_matrix_takes_the_gradient_of_a_dtensor(ranks):
    """That of a script which joins all gradients, changes them and splits them again."""
    parameter = nn.Parameter(torch.eye(4, 3))
    parameter.grad = torch.arange(12.0).view(4, 3)
    torch.optim.Muon([parameter]).step()
    assert ranks.run(2, with_sharded_gradient) == [parameter.tolist()] * 2


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)])
def test_the_work_is_what_torch_counts(shape):
    """By which matrices are divided between ranks, and a step's time is planned."""
    optimizer = torch.optim.Muon([nn.Parameter(torch.randn(shape))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(shape)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    expected = in_step("muon", [WholeTensor(shape, 4, None)], 1, 1).flops
    assert counter.get_total_flops() == expected > 0


def test_work_and_memory_are_divided():
    shapes = [(64, 64), (256, 64), (64, 256), (192, 64)] * 6
    for ranks in (1, 2, 3, 8, 24, 30):
        work = [0] * ranks
        for shape, owner in zip(shapes, division.owners(shapes, ranks), strict=True):
            work[owner] += division.cost(shape)
        assert max(work) <= sum(work) / ranks + max(map(division.cost, shapes))
        planned = division.rounds(shapes, ranks)
        owned = [[index for of_round in planned for index in of_round[rank]] for rank in range(ranks)]
        assert sorted(index for of_rank in owned for index in of_rank) == list(range(len(shapes)))
        assert [sum(division.cost(shapes[index]) for index in of_rank) for of_rank in owned] == work


def test_a_muon_that_is_not_known_gathers_whole_matrices(ranks):
    """A setting that another version of torch may add changes the step in a way that is not known here."""
    assert ranks.run(2, kinds_of_steps) == [["MuonStep", "WholeStep", "WholeStep"]] * 2


def kinds_of_steps() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    known, unknown, of_two = (torch.optim.Muon([parameter]) for _ in range(3))
    unknown.defaults["heads"] = 4
    square = init_device_mesh("cpu", (2, 1))
    split_twice = nn.Parameter(distribute_tensor(torch.ones(4, 4), square, [Shard(0), Shard(1)]))
    of_two.add_param_group({"params": [split_twice]})
    return [type(stepper_of(optimizer)).__name__ for optimizer in (known, unknown, of_two)]


def loaded(state: str) -> list[list[list[float]]]:
    """Weights after a step whose momentum was saved by one process, or which is of another shape."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.eye(4, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.Muon([parameter])
    stepper = stepper_of(optimizer)
    momentum = torch.arange(12.0).view(4, 3) if state == "whole" else torch.ones(5, 3)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"momentum_buffer": momentum}}})
    parameter.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    if state != "whole":
        with pytest.raises(UsageError, match=r"'momentum_buffer' of a parameter of shape \(4, 3\) .*\(got \(5, 3\)\)"):
            stepper.step()
        return []
    stepper.step()
    assert local_part(optimizer.state[parameter]["momentum_buffer"]).shape == (2, 3)
    return parameter.full_tensor().tolist()


@pytest.mark.parametrize("state", ["whole", "other"])
def test_momentum_of_one_process_is_taken(ranks, state):
    found = ranks.run(2, loaded, state)
    parameter = nn.Parameter(torch.eye(4, 3))
    optimizer = torch.optim.Muon([parameter])
    optimizer.state[parameter]["momentum_buffer"] = torch.arange(12.0).view(4, 3)
    parameter.grad = torch.ones(4, 3)
    optimizer.step()
    assert found == [parameter.tolist() if state == "whole" else []] * 2
