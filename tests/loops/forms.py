"""Forms of parameters and modules: parametrizations, pruning, memory formats, states kept between steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.loops.net import Part, adam, layers
from tests.loops.run import BATCH, BY_SIZE, WHOLE, Run, loop


class LowRank(nn.Module):
    """LoRA as a parametrization."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, columns)), nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up @ self.down


def _low_rank(linear: nn.Linear) -> None:
    linear.requires_grad_(False)
    parametrize.register_parametrization(linear, "weight", LowRank(*linear.weight.shape))


def _fit(run: Run, model: nn.Module) -> None:
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        loss = (model(run.draw(step, 5)) - 1).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)
        model.train(step % 2 == 1)


def _trained_with(register: Callable[[nn.Linear], Any]) -> Callable[[Run], None]:
    def trained(run: Run) -> None:
        torch.manual_seed(1)
        model = layers(5, 7, 7, 1)
        for one in model:
            if isinstance(one, nn.Linear):
                register(one)
        _fit(run, model)

    return trained


for _name, _register in {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "low_rank": _low_rank,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
}.items():
    for _wrap, _fsdp in {"by_size": BY_SIZE, "whole": WHOLE}.items():
        loop(f"with_{_name}_{_wrap}", fsdp=_fsdp, is_long_run_only=True)(_trained_with(_register))


@loop(fsdp=BY_SIZE, refused=dict.fromkeys((1, 2, 4, 5), "remove_parametrizations"), refused_alone=True)
def parametrizations_removed_after_training(run: Run) -> None:
    """Their buffers go too: those of DDP's model then are none. FSDP keeps what it has sharded (torch's own error)."""
    torch.manual_seed(1)
    model = layers(5, 7, 7, 1)
    for number in (0, 2):
        parametrizations.spectral_norm(model[number])
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        loss = (model(run.draw(step, 5)) - 1).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    model.eval()
    for number in (0, 2):
        parametrize.remove_parametrizations(run.unwrap(model)[number], "weight")
    with torch.no_grad():
        run.see_mean(model(run.draw(50, 5)).pow(2).mean())


@loop(fsdp=BY_SIZE, refused=dict.fromkeys((1, 2, 4, 5), "is a TorchScript module"), refused_alone=True)
def scripted(run: Run) -> None:
    torch.manual_seed(1)
    model = layers(5, 7, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        model = torch.jit.script(model)
    _fit(run, model)


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 7, 3), nn.Tanh(), nn.ConvTranspose2d(7, 3, 3))


def _channels_last(before: bool) -> Callable[[Run], None]:
    def channels_last(run: Run) -> None:
        torch.manual_seed(0)
        model: Any = Images().to(memory_format=torch.channels_last if before else torch.preserve_format)
        model, optimizer = run.prepare(model, adam(model.parameters()))
        model = model.to(memory_format=torch.channels_last)
        for step in range(3):
            loss = model(run.draw(step, 3, 5, 5).to(memory_format=torch.channels_last)).pow(2).mean()
            run.backward(loss)
            run.clip(model.parameters(), 1.0)
            run.step(optimizer)
            run.see_mean(loss)

    return channels_last


loop("channels_last_before_prepare", fsdp=BY_SIZE, is_long_run_only=True)(_channels_last(True))
loop("channels_last_after_prepare", fsdp=BY_SIZE)(_channels_last(False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 6), nn.Linear(6, 7)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.cell(x, state)
        return self.out(state), state


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def a_state_kept_between_steps(run: Run) -> None:
    """Truncated backpropagation in time; the model is called for each time, with one backward over all calls."""
    torch.manual_seed(1)
    model = Recurrent()
    model, optimizer = run.prepare(model, adam(model.parameters()))
    state = torch.zeros_like(run.draw(0, 6))
    for step in range(run.steps):
        loss, state = torch.zeros(()), state.detach()
        for x in run.draw(step, 3, 5).unbind(1):
            values, state = model(x, state)
            loss = loss + (values - 1).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


class Routed(nn.Module):
    """Each expert computes the samples that chose it: some ranks have none for it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(5, 3), nn.ModuleList(Part(5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


@loop(is_long_run_only=True)
def experts_without_samples(run: Run) -> None:
    torch.manual_seed(3)
    _fit(run, Routed())


class Adapted(nn.Module):
    """Keeps the layer that another one replaces, as peft does with modules that it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.new = nn.Linear(5, 7), nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.new(torch.tanh(self.first(x)))


@loop(fsdp=BY_SIZE, accumulation=2)
def windows_without_exchange_and_a_unit_that_forward_leaves_out(run: Run) -> None:
    torch.manual_seed(1)
    model = Adapted()
    model, optimizer = run.prepare(model, adam([p for p in model.parameters() if p.requires_grad]))
    for micro in range(6):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(micro)))
        with run.accumulate(model), run.no_sync(model) if micro % 2 == 0 else nullcontext():
            loss = model(x).pow(2).mean()
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)
