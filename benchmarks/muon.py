"""Muon's step on sharded matrices: shardkit, torch on sharded tensors, and torch on whole matrices.

    python -m benchmarks.muon [--ranks 2] [--layers 4] [--width 256] [--rounds 9] [--output muon.json]

CPU ranks with gloo hold the four matrices of each layer of a transformer. On whole matrices every rank orthogonalizes
all, as under DDP, without communication; gathered first, it is what a script can do by hand under FSDP2.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import interleaved, spawned_ranks
from benchmarks.spawned_ranks import seconds_of
from shardkit.optim.stepping import stepper_of
from shardkit.optim.whole_step import WholeStep

SHARDKIT, SHARDED = "shardkit", "torch, sharded tensors"
GATHERED, WHOLE = "gathered on all ranks", "torch, whole matrices"


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a step by contestant and round. Collective."""
    width = options.width
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * options.layers
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    model = nn.ParameterList(nn.Parameter(value.detach().clone()) for value in whole)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sharded = list(model.parameters())
    for parameter in (*whole, *sharded):
        parameter.grad = torch.ones_like(parameter)
    steps: dict[str, Callable[[torch.optim.Optimizer], Callable[[], Any]]] = {
        SHARDKIT: lambda optimizer: stepper_of(optimizer).step,
        SHARDED: lambda optimizer: optimizer.step,
        GATHERED: lambda optimizer: WholeStep(optimizer).step,
        WHOLE: lambda optimizer: optimizer.step,
    }
    measured: dict[str, list[float]] = {name: [] for name in steps}
    for _, name in interleaved.turns(list(steps), options.rounds):
        step = steps[name](torch.optim.Muon(whole if name == WHOLE else sharded))
        seconds_of(step)  # makes the state
        measured[name].append(min(seconds_of(step) for _ in range(3)))
    return measured


if __name__ == "__main__":
    spawned_ranks.main("step", __doc__, {"ranks": 2, "layers": 4, "width": 256, "rounds": 9}, measure)
