"""Losses made of derivatives by the inputs, as physics-informed networks have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from shardkit.sharding.fsdp.internals import takes_transforms
from tests.loops.net import layers
from tests.loops.run import BY_SIZE, Run, loop

Residual = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _trained(run: Run, residual: Residual) -> None:
    """The first forward of the model is one inside the transform; a usual one follows each step."""
    torch.manual_seed(1)
    model = layers(2, 6, 5, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for step in range(run.steps * run.accumulation):
        points = run.draw(step, 2)
        with run.accumulate(model):
            loss = residual(model, points).square().mean()
            run.backward(loss)
            run.step(optimizer)
        run.see_mean(loss)
        with torch.no_grad():
            run.see_mean(model(points).mean())


def _gradients(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    return vmap(grad(lambda point: model(point).sum()))(points)


RESIDUALS: dict[str, Residual] = {
    "jacrev": lambda model, points: vmap(jacrev(model))(points),
    "jacfwd": lambda model, points: vmap(jacfwd(model))(points),
    "jvp": lambda model, points: jvp(model, (points,), (torch.ones_like(points),))[1],
    "laplacian": lambda model, points: vmap(lambda point: hessian(lambda x: model(x).sum())(point).trace())(points),
    "with_values": lambda model, points: _gradients(model, points).sum(1, keepdim=True) - model(points),
    "vmap_alone": lambda model, points: vmap(model)(points),
}


def _loop_of(residual: Residual) -> Any:
    return lambda run: _trained(run, residual)


_REFUSED = {} if takes_transforms() else dict.fromkeys((1, 2, 4, 5), "needs torch 2.13 or newer")
_loop = partial(loop, fsdp=BY_SIZE, refused=_REFUSED, refused_alone=True)

for _name, _residual in RESIDUALS.items():
    _loop(f"derivatives_{_name}", is_long_run_only=_name not in ("jacrev", "with_values"))(_loop_of(_residual))
_loop("derivatives_in_windows", accumulation=3, is_long_run_only=True)(_loop_of(RESIDUALS["with_values"]))


class Equation(nn.Module):
    """A solution u(x, t), and an unknown of its equation."""

    def __init__(self) -> None:
        super().__init__()
        self.solution, self.log_diffusion = layers(2, 6, 5, 1), nn.Parameter(torch.tensor([-1.0]))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.solution(points)

    def residual(self, points: torch.Tensor) -> torch.Tensor:
        u = self(points)
        first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
        return first[:, 1] - self.log_diffusion.exp() * second


@loop(fsdp=BY_SIZE)
def an_unknown_of_an_equation(run: Run) -> None:
    """A method that calls the model itself and torch.autograd.grad, and then uses a parameter of the model."""
    torch.manual_seed(1)
    model = Equation()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    run.register(model, "residual")
    for step in range(run.steps):
        points, values = run.draw(step, 2).requires_grad_(), run.draw(step + 50, 1)
        loss = (model(points) - values).square().mean() + model.residual(points).square().mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
