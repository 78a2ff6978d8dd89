"""Small models that many tests share."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Block(nn.Module):
    """A pre-norm transformer block, attention written out."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.dropout(self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, vocabulary). 19 tokens: no world size but 1 divides it evenly."""

    def __init__(
        self, vocabulary: int = 19, width: int = 12, layers: int = 3, tied: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.register_buffer("position", torch.linspace(-1, 1, 64 * width).view(64, width), persistent=False)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Scaled(nn.Module):
    """A linear model with a parameter that has no dimension, and one row: nothing here divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x)
        return self.head(x * self.scale)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    """Images (batch, 3, 8, 8) -> logits (batch, 5); batch norm in every block."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(2))
        self.head = nn.Linear(channels, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each token from those before it."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of torch's; with this eps differences of rounding stay small."""
    return getattr(torch.optim, name)(model.parameters(), lr=1e-2, eps=1e-4)


class Reductions(TorchDispatchMode):
    """Records the dtypes of every reduction over the ranks inside it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("c10d::") and "reduce" in func._schema.name:
            first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            self.dtypes.append(str(first.dtype))
        return func(*args, **(kwargs or {}))
