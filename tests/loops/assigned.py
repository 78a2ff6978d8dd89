"""Values that scripts set by `tensor.data = values`, and memory that they keep by `tensor.data`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.loops.net import Net, adam, evaluate, loss_of, started, train
from tests.loops.run import Run, loop, whole


class Shadow:
    """An average of the weights, as many scripts have it: the present weights are kept without a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        self.backup: dict[str, torch.Tensor] = {}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name] = (0.2 * p.data + 0.8 * self.shadow[name]).clone()

    def apply(self) -> None:
        for name, p in self.model.named_parameters():
            self.backup[name] = p.data
            p.data = self.shadow[name]

    def restore(self) -> None:
        for name, p in self.model.named_parameters():
            p.data = self.backup[name]


@loop()
def averages_applied_and_the_weights_restored(run: Run) -> None:
    model, optimizer = started(run)
    average = Shadow(model)
    for step in range(run.steps):
        train(run, model, optimizer, step * run.steps)
        average.update()
        average.apply()
        evaluate(run, model)
        average.restore()


def _swap(ones: list[Any], others: list[Any]) -> None:
    for one, other in zip(ones, others, strict=True):
        one.data, other.data = other.data, one.data


@loop()
def averages_assigned_and_swapped(run: Run) -> None:
    """They are plain tensors, and parameters of the script's own."""
    model, optimizer = started(run)
    averages = [p.detach().clone() for p in model.parameters()]
    slow = [nn.Parameter(p.detach().clone(), requires_grad=False) for p in model.parameters()]
    for step in range(run.steps):
        train(run, model, optimizer, step * run.steps)
        for p, average, other in zip(model.parameters(), averages, slow, strict=True):
            average.data = average.data * 0.8 + p.data * 0.2
            other.data = p.data
            p.data = p.data * 0.9
        _swap([*model.parameters()], averages)
        evaluate(run, model)
        _swap(averages, slow)
        _swap([*model.parameters()], slow)


@loop()
def weights_of_two_models_swapped(run: Run) -> None:
    first, second = Net(), Net()
    first, second, for_first, for_second = run.prepare(
        first, second, adam(first.parameters()), adam(second.parameters())
    )
    for step in range(run.steps):
        train(run, first, for_first, step * run.steps)
        train(run, second, for_second, step * run.steps + 50)
        _swap([*first.parameters()], [*second.parameters()])


@loop()
def gradients_assigned(run: Run) -> None:
    """Also under DDP, whose gradients are parts of its buckets."""
    model, optimizer = started(run)
    for step in range(6):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        for p in model.parameters():
            p.grad.data = p.grad.data.clamp(-0.01, 0.02) + 0.01 * p.data
        run.step(optimizer)
        run.see_mean(loss)


@loop(accumulation=2)
def gradients_assigned_at_any_time(run: Run) -> None:
    """After an evaluation, twice, before a gradient is used up, and in a window."""
    model, optimizer = started(run)
    for step in range(8):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(step))
            run.backward(loss)
            if step % 3 == 0:
                evaluate(run, model)
            for p in model.parameters():
                if run.is_step and step != 3:
                    p.grad.data = p.grad.data.clamp(-0.01, 0.02) + 0.01 * p.data
                    p.grad.data = p.grad.data * 2
            if step == 5:
                run.see_mean(loss_of(model, run.batch(99)))
            if run.is_step:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step < 4)
            run.see_mean(loss)


@loop()
def state_of_the_optimizer_assigned(run: Run) -> None:
    model, optimizer = started(run)
    train(run, model, optimizer)
    kept = copy.deepcopy([optimizer.state[p]["exp_avg"] for p in model.parameters()])
    train(run, model, optimizer, 10)
    for p, momentum in zip(model.parameters(), kept, strict=True):
        state = optimizer.state[p]
        state["exp_avg"].data = momentum * 0.5
        state["exp_avg_sq"].data = state["exp_avg_sq"].data + 0.1
    train(run, model, optimizer, 20)


@loop()
def whole_values_copied_in(run: Run) -> None:
    """A snapshot that every rank has whole, as one of a loaded object is: weights are set back to it, and gradients
    to values of the script's own."""
    model, optimizer = started(run)
    snapshot = {name: whole(p).clone() for name, p in model.named_parameters()}
    for step in range(3):
        train(run, model, optimizer, step * run.steps)
        with torch.no_grad():
            for number, (name, p) in enumerate(model.named_parameters()):
                (p if number % 2 else p.data).copy_(snapshot[name].to(torch.float64))
        inner: Any = run.unwrap(model)
        inner.embed.weight.data[:] = 0.5 * snapshot_of(snapshot, "embed.weight")
        inner.norm.weight.data.copy_(torch.tensor([0.9], device=run.device))
        run.backward(loss_of(model, run.batch(step)))
        for name, p in model.named_parameters():
            p.grad.copy_(0.1 * snapshot[name])
        run.step(optimizer)


def snapshot_of(snapshot: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """By its name in the model, which DDP's has with a prefix."""
    return next(values for key, values in snapshot.items() if key.removeprefix("module.") == name)


@loop()
def copies_and_norms_where_the_weights_are(run: Run) -> None:
    """Those of offloaded weights in host memory."""
    model, optimizer = started(run)
    copies = [torch.zeros(p.shape, device=p.device) for p in model.parameters()]
    for step in range(run.steps):
        run.backward(loss_of(model, run.batch(step)))
        for copied, p in zip(copies, model.parameters(), strict=True):
            copied.data = p.data.clone()
            assert copied.device == p.device
            run.see(copied.norm() + torch.tensor(p.grad.norm().cpu().numpy()).to(p.device))
        run.step(optimizer)
