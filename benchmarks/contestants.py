"""The same training, written the way each library's documentation writes it.

Each function sets its side up on the ranks that are there and returns a loop: called with a number, it trains so many
steps. Model, data, batch and optimizer are the same for all. One that cannot run here raises Unavailable and says why.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardkit.model import gpt_module
from shardkit.model.gpt import GptShape

Loop = Callable[[int], None]


class Unavailable(Exception):
    """Why a contestant does not take part."""


@dataclass(frozen=True)
class Task:
    """What is trained: a GPT of this size on random tokens, `batch` samples a rank and step."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    batch: int
    device: str

    def model(self) -> nn.Module:
        """The model, with equal weights for everyone."""
        torch.manual_seed(0)
        return gpt_module.GPT(GptShape(self.layers, self.hidden, self.heads, self.vocab, self.seq))

    def dataset(self) -> TensorDataset:
        """Enough samples that epochs do not matter."""
        chosen = torch.Generator().manual_seed(0)
        samples = 256 * self.batch * dist.get_world_size()
        return TensorDataset(torch.randint(self.vocab, (samples, self.seq), generator=chosen))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next token."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches(loader: Any) -> Iterator[torch.Tensor]:
    """Batches of tokens, epoch after epoch."""
    while True:
        for (tokens,) in loader:
            yield tokens


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Every block a unit, and the rest one."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def by_hand_fsdp(task: Task, fused: bool | None) -> Loop:
    """torch's FSDP2 as its tutorial has it."""
    model = shard(task.model().to(task.device), init_device_mesh(task.device, (dist.get_world_size(),)))
    return _by_hand(task, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))


def by_hand_ddp(task: Task, fused: bool | None) -> Loop:
    """torch's DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(task.model().to(task.device))
    return _by_hand(task, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))


def _by_hand(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Loop:
    dataset = task.dataset()
    source = batches(DataLoader(dataset, task.batch, sampler=DistributedSampler(dataset)))

    def train(steps: int) -> None:
        for _ in range(steps):
            tokens = next(source).to(task.device)
            loss_of(model(tokens), tokens).backward()
            optimizer.step()
            # Where the other loops have it: just before forward, CPU ranks have fewer page faults, 2 to 3 % of a step.
            optimizer.zero_grad()

    return train


def with_shardkit(task: Task) -> Loop:
    """shardkit, with the mode that the launched configuration names and an optimizer as torch makes it."""
    from shardkit import Accelerator

    return _accelerated(Accelerator(), task)


def with_accelerate_ddp(task: Task) -> Loop:
    """accelerate, in data parallel."""
    return _accelerated(accelerate_here(cpu=task.device == "cpu"), task)


def accelerate_here(cpu: bool) -> Any:
    """accelerate's Accelerator, on all ranks."""
    try:
        from accelerate import Accelerator
    except ImportError as reason:
        raise Unavailable(f"accelerate cannot be imported ({reason})") from reason
    accelerator = Accelerator(cpu=cpu)
    if accelerator.num_processes != dist.get_world_size():
        raise Unavailable(f"accelerate sees {accelerator.num_processes} processes, not {dist.get_world_size()}")
    return accelerator


def with_accelerate_fsdp(task: Task) -> Loop:
    """accelerate with its FSDP2 plugin; it has none on a CPU."""
    if task.device == "cpu":
        raise Unavailable("accelerate has no FSDP on a CPU: it falls back to data parallel")
    try:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
    except ImportError as reason:
        raise Unavailable(f"accelerate cannot be imported ({reason})") from reason
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
    )
    return _accelerated(Accelerator(fsdp_plugin=plugin), task)


def _accelerated(accelerator: Any, task: Task) -> Loop:
    """The loop that both Accelerators have in their documentation."""
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(task.dataset(), task.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    source = batches(loader)

    def train(steps: int) -> None:
        for _ in range(steps):
            tokens = next(source)
            with accelerator.accumulate(model):
                loss = loss_of(model(tokens), tokens)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return train


def with_fabric_fsdp(task: Task, fused: bool | None) -> Loop:
    """Lightning Fabric's strategy for FSDP2."""
    try:
        from lightning_fabric.strategies import ModelParallelStrategy
    except ImportError as reason:
        raise Unavailable(f"lightning-fabric cannot be imported ({reason})") from reason
    world_size = dist.get_world_size()
    strategy = ModelParallelStrategy(
        parallelize_fn=lambda model, mesh: shard(model, mesh["data_parallel"]),
        data_parallel_size=world_size,
        tensor_parallel_size=1,
    )
    return _with_fabric(task, strategy, fused)


def with_fabric_ddp(task: Task) -> Loop:
    """Lightning Fabric in data parallel."""
    try:
        from lightning_fabric.strategies import DDPStrategy
    except ImportError as reason:
        raise Unavailable(f"lightning-fabric cannot be imported ({reason})") from reason
    return _with_fabric(task, DDPStrategy(), fused=None)


def _with_fabric(task: Task, strategy: Any, fused: bool | None) -> Loop:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator=task.device, devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = fabric.setup(task.model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))
    source = batches(fabric.setup_dataloaders(DataLoader(task.dataset(), task.batch, shuffle=True)))

    def train(steps: int) -> None:
        for _ in range(steps):
            tokens = next(source)
            loss = loss_of(model(tokens), tokens)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return train


HAND_FUSED = "by hand, fused AdamW"
HAND_DEFAULT = "by hand, default AdamW"
SHARDKIT = "shardkit"

FAMILIES: dict[str, dict[str, Callable[[Task], Loop]]] = {
    "fsdp": {
        SHARDKIT: with_shardkit,
        HAND_FUSED: lambda task: by_hand_fsdp(task, fused=True),
        HAND_DEFAULT: lambda task: by_hand_fsdp(task, fused=None),
        "Fabric, fused AdamW": lambda task: with_fabric_fsdp(task, fused=True),
        "Fabric, default AdamW": lambda task: with_fabric_fsdp(task, fused=None),
        "accelerate": with_accelerate_fsdp,
    },
    "ddp": {
        SHARDKIT: with_shardkit,
        HAND_FUSED: lambda task: by_hand_ddp(task, fused=True),
        HAND_DEFAULT: lambda task: by_hand_ddp(task, fused=None),
        "Fabric, default AdamW": with_fabric_ddp,
        "accelerate, default AdamW": with_accelerate_ddp,
    },
}
