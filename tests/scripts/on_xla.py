"""Trains a small GPT by the public face in one way, and reports losses, layouts and sums.

    python tests/scripts/on_xla.py ORDER.json ANSWER.json

The order: config, steps, and what else is asked for (see `Order`).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from shardkit import Accelerator, set_seed
from tests import models

SEQ = 17


@dataclass(frozen=True)
class Order:
    """What one process does. `given`: settings of the Accelerator's file."""

    config: dict[str, Any]
    steps: int = 4
    dropout: float = 0.0
    tied: bool = True
    accumulate: int = 1
    batch: int = 8
    load: str | None = None
    save: str | None = None
    save_beside: str | None = None
    export: str | None = None
    load_whole: bool = False
    go_back: str | None = None
    """The folder of a state: it is saved after the steps, and loaded after as many more, which are then done again."""
    parts: list[str] = field(default_factory=list)


class Tokens(Dataset):
    """Sample i is a function of i."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, 19, (SEQ,), generator=torch.Generator().manual_seed(index))


def main() -> None:
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    set_seed(0)
    accelerator = Accelerator(config=order.config)
    set_seed(0)
    model = models.Gpt(width=16, layers=2, tied=order.tied, dropout=order.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    loader = DataLoader(Tokens(), batch_size=order.batch // accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.gradient_accumulation_steps = order.accumulate
    if order.load is not None:
        accelerator.load_state(order.load)
    if order.load_whole:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    losses: list[float] = []

    def train(batches: Iterator[torch.Tensor]) -> Any:
        """Train the steps; the last gradient norm."""
        norm = None
        for _ in range(order.steps * order.accumulate):
            tokens = next(batches)
            with accelerator.accumulate(model):
                loss = models.next_token_loss(model, tokens)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        return norm

    batches = iter(loader) if order.steps else iter(())
    norm = train(batches)
    if order.go_back is not None:
        accelerator.save_state(order.go_back)
        train(batches)
        del batches  # the loop is left: a loader cannot be moved inside one
        accelerator.load_state(order.go_back)
        train(iter(loader))
    found = {"losses": losses, "norm": None if norm is None else float(norm), "device": str(accelerator.device)}
    found |= {"num_processes": accelerator.num_processes, "type": accelerator.distributed_type.value}
    if order.save is not None:
        accelerator.save_state(order.save)
    if order.save_beside is not None:
        accelerator.save_state(order.save_beside, blocking=False)
    if order.export is not None:
        accelerator.save_model(model, order.export)
    state = accelerator.get_state_dict(model)
    found["sum"] = sum(value.double().abs().sum().item() for value in state.values())
    found["is_tied"] = model.head.weight is model.embed.weight
    if accelerator.device.type == "xla":
        from shardkit.distributed import xla

        xla.flush()
        rows = [value for row in optimizer.state.values() for value in row.values()]
        found["spread"] = {
            "parameters": [xla.layout_of(p) for p in model.parameters()],
            "state": [xla.is_spread(value) for value in rows if value.dim()],
        }
    accelerator.end_training()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
