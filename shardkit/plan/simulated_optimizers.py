"""The optimizers of a simulated step, by the names of `optimizers` or made by the script's own function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.errors import UsageError
from shardkit.model.probe import error_text
from shardkit.plan.batches import named
from shardkit.plan.optimizers import QUANTIZED, Quantized, is_quantized

OptimizerFactory = Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]]
"""Makes the optimizers of the trained parameters, which it gets by name."""


def optimizer_factory(name: str, kinds: Mapping[str, str] | None = None) -> OptimizerFactory:
    """The optimizer of that name, or the optimizers of `module:function`. `kinds`: that of each parameter, by name,
    where it may be another (`unit_sizes.optimizers_of`)."""
    if ":" in name:
        return _given_optimizers(name)
    if kinds and {*kinds.values()} != {name}:
        return partial(_by_kind, kinds)
    known: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "lion": (_Lion, {}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {}),
        "adagrad": (torch.optim.Adagrad, {}),
        "rmsprop": (torch.optim.RMSprop, {}),
        "adafactor": (torch.optim.Adafactor, {}),
        "muon": (torch.optim.Muon, {}),
        "nadam": (torch.optim.NAdam, {}),
        "radam": (torch.optim.RAdam, {}),
        "adamax": (torch.optim.Adamax, {}),
        "rprop": (torch.optim.Rprop, {}),
        "asgd": (torch.optim.ASGD, {}),
        "adadelta": (torch.optim.Adadelta, {}),
        # schedule_free is no dependency; these keep and make as much.
        "adamwschedulefree": (torch.optim.NAdam, {}),
        "sgdschedulefree": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    }
    if (quantized := QUANTIZED.get(name)) is not None:
        return lambda parameters: [_Quantized([*parameters.values()], quantized)]
    kind, arguments = known[name]
    return lambda parameters: [kind([*parameters.values()], **arguments)]


def _by_kind(kinds: Mapping[str, str], parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """One optimizer of each kind, with its parameters."""
    found: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        found.setdefault(kinds[name], {})[name] = parameter
    return [optimizer for kind, own in found.items() for optimizer in optimizer_factory(kind)(own)]


def _given_optimizers(spec: str) -> OptimizerFactory:
    make = named("--optimizer", spec)
    advice = "it is called with the list of trained parameters, and returns their torch.optim.Optimizer, or several."

    def made(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        try:
            found = make([*parameters.values()])
        except Exception as error:
            raise UsageError(f"--optimizer {spec}: cannot be made ({error_text(error)}); {advice}") from error
        optimizers = list(found) if isinstance(found, (list, tuple)) else [found]
        if wrong := [type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.Optimizer)]:
            raise UsageError(f"--optimizer {spec}: is not an optimizer (got {', '.join(wrong)}); {advice}")
        return optimizers

    return made


class _Lion(torch.optim.Optimizer):
    """In place of Lion, which torch lacks: one moment, and the updates of all parameters at once."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["moment"] = torch.zeros_like(_local(parameter))
            updates = [self.state[parameter]["moment"].mul(0.9) for parameter in parameters]
            for parameter, update in zip(parameters, updates, strict=True):
                _local(parameter).add_(update.add_(_local(parameter.grad)).sign_(), alpha=-1e-4)


class _Quantized(torch.optim.Optimizer):
    """In place of Adam in torchao.optim: the same moments; its compiled step allocates nothing else."""

    def __init__(self, parameters: list[nn.Parameter], kind: Quantized) -> None:
        super().__init__(parameters, {})
        self._kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    value = _local(parameter)
                    state = self.state[parameter]
                    if not state:
                        state.update(self._moments(value))
                    value.add_(_local(parameter.grad), alpha=-1e-3)

    def _moments(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        kind, found = self._kind, {}
        for moment in ("first", "second"):
            if not is_quantized(kind, value.numel()):
                found[moment] = torch.zeros_like(value)
                continue
            found[moment] = torch.zeros(value.numel() * kind.bits // 8, dtype=torch.uint8)
            found[f"{moment}_scale"] = torch.zeros(value.numel() // kind.block)
            found[f"{moment}_table"] = torch.zeros(kind.table)
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
