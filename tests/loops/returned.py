"""Gradients of parameters that `torch.autograd.grad` returns. Under a sharded strategy they are means over the ranks,
like those of a backward; under DDP they are those of each rank's samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.loops.net import Part, evaluate, layers, loss_of, started
from tests.loops.run import BY_SIZE, Run, loop

Tensors = Iterable[torch.Tensor]


def assign(parameters: Tensors, gradients: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def product(some: Tensors, others: Tensors) -> Any:
    return sum((one * other).sum() for one, other in zip(some, others, strict=True))


def regression(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    return started(run, layers(5, 7, 3))


def error(run: Run, model: nn.Module, number: int) -> torch.Tensor:
    return nn.functional.mse_loss(model(run.draw(number, 5)), run.draw(number + 50, 3))


@loop()
def gradients_of_autograd_grad(run: Run) -> None:
    """Assigned by hand, without a backward."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        parameters = list(model.parameters())
        assign(parameters, torch.autograd.grad(loss, parameters, allow_unused=step % 2 == 0))
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def backward_to_given_parameters(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss, inputs=list(model.parameters()))
        run.step(optimizer)
        run.see_mean(loss)


@loop(accumulation=2)
def gradients_returned_in_windows(run: Run) -> None:
    """zero_grad after each micro-batch keeps them, as it keeps those of a backward."""
    model, optimizer = started(run)
    for step in range(2 * run.steps):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(step))
            parameters = list(model.parameters())
            found = torch.autograd.grad(loss / run.accumulation, parameters)
            assign(parameters, [g if p.grad is None else p.grad + g for p, g in zip(parameters, found, strict=True)])
            run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def an_adaptive_weight_of_a_loss(run: Run) -> None:
    """As a VQGAN weighs its losses: by the norms of their gradients in the last layer."""
    model, optimizer = regression(run)
    last: Any = list(run.unwrap(model).parameters())[-2]
    for step in range(run.steps):
        found = model(run.draw(step, 5))
        first, second = (found - run.draw(step + 50, 3)).abs().mean(), -(found * run.draw(step + 90, 3)).mean()
        norms = [run.mean(torch.autograd.grad(one, last, retain_graph=True)[0]).norm() for one in (first, second)]
        weight = (norms[0] / (norms[1] + 1e-4)).clamp(0, 1e4).detach()
        run.backward(first + 0.8 * weight * second)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see(weight)
        run.see_mean(first)


@loop(fsdp=BY_SIZE, is_for_shards=True)
def a_penalty_on_gradients(run: Run) -> None:
    """A second backward, through the gradients; in every other step they have a graph in vain."""
    model, optimizer = regression(run)
    for step in range(run.steps):
        loss = error(run, model, step)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = product(found, found)
        run.backward(loss + 0.1 * penalty if step % 2 else error(run, model, step))
        run.step(optimizer)
        run.see(penalty)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE, is_for_shards=True)
def products_with_the_hessian(run: Run) -> None:
    """Its product with the gradient, added to it."""
    model, optimizer = regression(run)
    for step in range(run.steps):
        parameters = list(model.parameters())
        found = torch.autograd.grad(error(run, model, step), parameters, create_graph=True)
        vector = [one.detach() for one in found]
        products = torch.autograd.grad(product(found, vector), parameters)
        assign(parameters, [one + 0.1 * other for one, other in zip(vector, products, strict=True)])
        run.see(product(vector, products))
        run.step(optimizer)
        run.see_mean(error(run, model, step))


@loop(is_for_shards=True)
def weights_of_the_loss_and_the_forward(run: Run) -> None:
    """What parameters are to the loss itself, and what they are to the forward, in one gradient."""
    model, optimizer = started(run)
    for step in range(run.steps):
        parameters = list(model.parameters())
        loss = loss_of(model, run.batch(step)) + 0.1 * product(parameters, parameters)
        gradients = torch.autograd.grad(loss, parameters)
        run.see(product(gradients, gradients))
        assign(parameters, gradients)
        run.step(optimizer)
        evaluate(run, model)


class _Adjoint(torch.autograd.Function):
    """Euler's steps of an ordinary differential equation, whose backward solves the adjoint equation."""

    @staticmethod
    def forward(ctx: Any, slope: nn.Module, state: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            state = state + 0.1 * slope(state)
        ctx.slope, ctx.parameters = slope, parameters
        ctx.save_for_backward(state)
        return state

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (state,), (of_state,) = ctx.saved_tensors, gradients
        sums = [torch.zeros_like(one) for one in ctx.parameters]
        for _ in range(3):
            with torch.no_grad():
                state = state - 0.1 * ctx.slope(state)
            with torch.enable_grad():
                before = state.detach().requires_grad_(True)
                after = before + 0.1 * ctx.slope(before)
                of_state, *others = torch.autograd.grad(after, (before, *ctx.parameters), of_state)
            sums = [one + other for one, other in zip(sums, others, strict=True)]
        return None, of_state, *sums


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.slope, self.last = nn.Linear(5, 7), Part(7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Adjoint.apply(self.slope, self.first(x), *self.slope.parameters()))


@loop(bound=1e-3)
def an_adjoint_equation(run: Run) -> None:
    model, optimizer = started(run, _Flow())
    for step in range(run.steps):
        loss = error(run, model, step)
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
