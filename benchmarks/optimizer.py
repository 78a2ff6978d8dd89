"""The optimizer's step over many sharded tensors: shardkit, torch on sharded tensors, and torch's kernels alone.

    python -m benchmarks.optimizer [--tensors 100 1000 10000] [--rounds 5] [--output optimizer.json]

Two CPU ranks with gloo hold so many parameters of 64 x 32, AdamW. "First" is the first step of a fresh optimizer, which
makes its state; "later" the steps after it. The kernels alone get plain tensors of the same local sizes. Torch on
sharded tensors works every list of them out anew, by the square of its length: above `--limit` tensors it is left out.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import interleaved
from benchmarks.spawned_ranks import join, leave, seconds_of
from shardkit.optim.stepping import stepper_of

ROWS, COLUMNS = 64, 32
SHARDKIT, KERNELS, BY_LIST, ONE_BY_ONE = "shardkit", "kernels alone", "torch, foreach", "torch, one by one"
# What the project promises: the median of ratios within a round.
TARGET = 1.2


def main() -> None:
    """Measure, print a table for each number of tensors, write JSON where it is asked for."""
    options = _options()
    torch.multiprocessing.spawn(_rank, (options,), 2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=500, help="most tensors that torch's own path is asked to step")
    parser.add_argument("--output", type=interleaved.writable)
    return parser.parse_args()


def _rank(rank: int, options: argparse.Namespace) -> None:
    join(rank, 2)
    result: dict[str, Any] = {**interleaved.surroundings(), "ranks": 2, "rows": ROWS, "columns": COLUMNS}
    for count in options.tensors:
        result[str(count)] = {}
        for what, measured in zip(("first", "later"), measure(count, options.rounds, options.limit), strict=True):
            result[str(count)][what] = interleaved.summary(measured, interleaved.ratios(measured, SHARDKIT))
            if rank == 0:
                _show(count, f"{what} step", measured)
    if rank == 0 and options.output:
        interleaved.write(options.output, result)
    leave()


def measure(count: int, rounds: int, limit: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of (the first step, a later one) by contestant and round. Collective."""
    sharded, plain = _parameters(count)
    steps: dict[str, Callable[[torch.optim.Optimizer], Callable[[], Any]]]
    steps = {SHARDKIT: lambda optimizer: stepper_of(optimizer).step, KERNELS: lambda optimizer: optimizer.step}
    if count <= limit:
        steps |= {BY_LIST: lambda optimizer: optimizer.step, ONE_BY_ONE: lambda optimizer: optimizer.step}
    settings = {KERNELS: {"fused": True}, BY_LIST: {"foreach": True}, ONE_BY_ONE: {"foreach": False}}
    first: dict[str, list[float]] = {name: [] for name in steps}
    later: dict[str, list[float]] = {name: [] for name in steps}
    for _, name in interleaved.turns(list(steps), rounds):
        optimizer = torch.optim.AdamW(plain if name == KERNELS else sharded, **settings.get(name, {}))
        step = steps[name](optimizer)
        first[name].append(seconds_of(step))
        later[name].append(min(seconds_of(step) for _ in range(3)))
    return first, later


def _parameters(count: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Sharded parameters with gradients, and plain ones of the size that a rank holds of them."""
    model = nn.ParameterList(nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(count))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sharded = list(model.parameters())
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in sharded]  # type: ignore[attr-defined]
    for parameter in (*sharded, *plain):
        parameter.grad = torch.ones_like(parameter)
    return sharded, plain


def _show(count: int, what: str, measured: dict[str, list[float]]) -> None:
    ratios = interleaved.ratios(measured, SHARDKIT)
    print(f"{what}, {count:,} tensors", interleaved.table(measured, ratios), sep="\n", flush=True)
    print(f"  target: {SHARDKIT} / {KERNELS} at most {TARGET}", flush=True)


if __name__ == "__main__":
    main()
