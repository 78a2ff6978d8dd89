"""Muon's step, divided between the ranks, beside torch's own on whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardkit.distributed.tensors import is_dtensor
from shardkit.optim import division
from shardkit.optim.muon_step import MuonStep
from shardkit.optim.stepping import stepper_of

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
