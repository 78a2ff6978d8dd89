"""Loops that join all weights or gradients into one vector, or take their norms; torch refuses to flatten or to add
some of their sizes, and to change what is pending."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.loops.net import Net, loss_of, started
from tests.loops.run import Run, loop


class Scored(Net):
    """With a single output."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(7, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.features(tokens)
        return self.head(x) + self.score(x)


class Scaled(Scored):
    """Also with a parameter without a dimension, which every rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.strength


def _begun(run: Run, kind: type[Scored]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return started(run, kind())


@loop()
def gradients_joined_and_split(run: Run) -> None:
    """As published GANs clean them, and gradient surgery projects them."""
    model, optimizer = _begun(run, Scaled)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        parameters = list(model.parameters())
        joined = torch.cat([p.grad.flatten() for p in parameters])
        torch.nan_to_num(joined, nan=0.0, posinf=1e5, neginf=-1e5, out=joined)
        joined = joined / joined.norm()
        for p, gradient in zip(parameters, joined.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.reshape(p.shape)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def weights_joined_and_split(run: Run) -> None:
    model, optimizer = _begun(run, Scored)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        with torch.no_grad():
            vector_to_parameters(parameters_to_vector(model.parameters()) * 0.9, model.parameters())
            run.see(parameters_to_vector(model.parameters()).norm())


@loop(accumulation=2)
def a_penalty_of_the_vector_in_windows(run: Run) -> None:
    model, optimizer = _begun(run, Scored)
    for micro in range(6):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro)) + 0.01 * parameters_to_vector(model.parameters()).pow(2).sum()
            run.backward(loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters()))
            run.step(optimizer)


def _norms_of_units(x: torch.Tensor) -> torch.Tensor:
    return x.norm() if x.dim() < 2 else x.norm(dim=tuple(range(1, x.dim())), keepdim=True)


@loop()
def adaptive_clipping(run: Run) -> None:
    """As timm writes it: norms are limited in place."""
    model, optimizer = _begun(run, Scaled)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        for p in model.parameters():
            gradient: Any = p.grad
            largest = _norms_of_units(p.detach()).clamp_(min=1e-3).mul_(0.01)
            norms = _norms_of_units(gradient)
            clipped = gradient * (largest / norms.clamp(min=1e-6))
            gradient.detach().copy_(torch.where(norms < largest, gradient, clipped))
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def norms_changed_in_place(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(2):
        run.backward(loss_of(model, run.batch(step)))
        for p in model.parameters():
            gradient: Any = p.grad
            for value in (gradient.norm(), gradient.abs().sum(), gradient.max(), gradient.norm(1)):
                value += 0.5
                value -= 0.1
                run.see(value.abs_().clamp_min_(0.1).sqrt_().mul_(0.3).pow_(2).neg_().exp_().log_().clamp_max_(1))
        run.step(optimizer)
