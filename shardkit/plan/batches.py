"""What a simulated step computes: a batch for the model, and its loss, as a training script would."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardkit.errors import UsageError

Loss = Callable[[nn.Module], tuple[Any, torch.Tensor]]


def named(spec: str) -> Any:
    """What `module:name` names."""
    module, _, attribute = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def next_token_loss(batch_size: int, seq_len: int, vocabulary: int) -> Loss:
    """For a model that makes logits (batch, seq, vocab) of token numbers: cross-entropy with the same tokens."""
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)

    def loss(model: nn.Module) -> tuple[Any, torch.Tensor]:
        logits = model(tokens)
        return logits, functional.cross_entropy(logits.reshape(-1, vocabulary), tokens.reshape(-1))

    return loss


def given_loss(batch: Any) -> Loss:
    """For what --batch makes: keywords, positional arguments, or the one argument of the model."""

    def loss(model: nn.Module) -> tuple[Any, torch.Tensor]:
        if isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        return output, loss_in(output)

    return loss


def loss_in(output: Any) -> torch.Tensor:
    """The loss that the output holds; else the sum of the means of all its floating-point tensors."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    tensors = [
        t
        for t in torch.utils._pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    if not tensors:
        raise UsageError("--batch: the model's output has no gradient (got no tensor that requires one); train some.")
    return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def transformers_batch(model: nn.Module, batch_size: int, seq_len: int | None) -> dict[str, torch.Tensor]:
    """Inputs and labels for a Transformers model, as its class expects them."""
    config: Any = model.config
    name = type(model).__name__
    one_label = torch.zeros(batch_size, dtype=torch.long)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        inputs = {"pixel_values": torch.zeros(batch_size, getattr(config, "num_channels", 3), height, width)}
        return inputs | ({"labels": one_label} if "Classification" in name else {})
    tokens = torch.zeros(batch_size, seq_len or _longest(config), dtype=torch.long)
    inputs = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    if any(part in name for part in ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "Seq2SeqLM")):
        return inputs | {"labels": tokens}
    return inputs | ({"labels": one_label} if "SequenceClassification" in name else {})


def _longest(config: Any) -> int:
    return next((n for n in (getattr(config, k, None) for k in ("max_position_embeddings", "n_positions")) if n), 512)


def optimizer_factory(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """The optimizer of that name, or what `module:function` makes of the parameters."""
    if ":" in name:
        return named(name)
    known: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "lion": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),  # torch has none; it keeps one moment too
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adafactor": (_Factored, {}),
    }
    kind, arguments = known[name]
    return lambda parameters: kind(parameters, **arguments)


class _Factored(torch.optim.Optimizer):
    """Stands for Adafactor (https://arxiv.org/abs/1804.04235), whose update in torch refuses sharded parameters:
    a row and a column of second moments for each matrix, and an update as large as the gradient for a moment."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, _local(parameter), _local(parameter.grad))

    def _update(self, parameter: nn.Parameter, value: torch.Tensor, gradient: torch.Tensor) -> None:
        squares = gradient.square()
        state = self.state[parameter]
        for number, moment in enumerate([squares.mean(-1), squares.mean(-2)] if value.dim() > 1 else [squares]):
            state.setdefault(f"moment_{number}", moment).lerp_(moment, 0.1)
        update = gradient / (1 + gradient.square())
        value.sub_(update, alpha=1e-3)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
