"""A small training, for tests of the Accelerator: samples, models, and the loop on ranks and by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardkit import Accelerator

FULL = {"distributed_type": "FSDP", "use_cpu": True}
DDP = {"distributed_type": "MULTI_CPU"}
BOTH = [pytest.param(FULL, id="full"), pytest.param(DDP, id="ddp")]


class Points(Dataset):
    """Samples that are a function of their index."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(length, 6, generator=generator)
        self.y = torch.randn(length, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index], "index": index}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stream(IterableDataset):
    """The same samples, one after the other, with no length."""

    def __init__(self, length: int) -> None:
        self.points = Points(length)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.points[index] for index in range(len(self.points)))


class Adapted(nn.Module):
    """A frozen model with a small trained part, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Model().requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def parts(
    length: int, batch_size: int, make_model: type[nn.Module] = Model
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, Any]:
    torch.manual_seed(1)
    model = make_model()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, DataLoader(Points(length), batch_size=batch_size), scheduler


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def one_step(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Any) -> None:
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


def plain(
    length: int, global_batch: int, accumulation: int, epochs: int, make_model: type[nn.Module] = Model
) -> dict[str, Any]:
    """One process, by hand: the gradient of a step is the mean over its micro-batches, of which the last may be few."""
    model, optimizer, loader, scheduler = parts(length, global_batch, make_model)
    norms, rates = [], []
    for _ in range(epochs):
        batches = list(loader)
        for start in range(0, len(batches), accumulation):
            window = batches[start : start + accumulation]
            for batch in window:
                (loss_of(model, batch) / len(window)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
            optimizer.zero_grad()
    return {"weights": weights_of(model), "norms": norms, "rates": rates}


def loop(config: dict, length: int, batch_size: int, accumulation: int, epochs: int) -> dict[str, Any]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=accumulation)
    model, optimizer, loader, scheduler = parts(length, batch_size)
    scheduler, model, loader, optimizer = accelerator.prepare(scheduler, model, loader, optimizer)
    norms, rates = [], []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
                assert type(norm) is torch.Tensor
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                norms.append(float(norm))
                rates.append(scheduler.get_last_lr()[0])
    counters = accelerator.counters
    counted = (counters.step, counters.micro_step, counters.samples_seen)
    return {"weights": weights_of(model), "norms": norms, "rates": rates, "counted": counted}
