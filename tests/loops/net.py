"""The model that most loops train, and what many loops do with it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.loops.run import WORDS, Run


class Part(nn.Module):
    """The block that is a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Tokens (batch, 6) -> logits (batch, 6, WORDS). No size divides by 2 or 3."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.parts = nn.ModuleList(Part(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.features(tokens[:, :-1])), tokens)


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers of these widths, with tanh in between."""
    inner = [one for pair in pairwise(sizes) for one in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*inner[:-1])


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1]), tokens)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)  # a large epsilon: some gradients are zero but for rounding


def evaluate(run: Run, model: nn.Module, context: Any = torch.no_grad) -> None:
    """What an evaluation gives; the model is left as it was found."""
    model.eval()
    with context():
        run.see_mean(loss_of(model, run.batch(777)))
    model.train()


def started(run: Run, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net() if model is None else model
    return run.prepare(model, adam(model.parameters()))


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
