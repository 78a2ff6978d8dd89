"""The model of these checkpoints, its data, and its param groups."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, is_tied: bool, is_frozen: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 6, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1, 6))
        self.register_buffer("seen", torch.tensor(0))
        self.head = nn.Linear(6, 11)
        if is_tied:
            self.head.weight = self.embedding.weight
        if is_frozen:
            self.first.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        dtype = self.second.weight.dtype
        self.seen += 1
        hidden = self.second(torch.tanh(self.first(self.embedding(tokens).to(dtype))))
        return self.head(hidden * self.scale.to(dtype))


def groups_of(net: nn.Module) -> list[dict]:
    """Weights decay, biases do not."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.ndim == 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float(), (tokens + 1) % 11)
