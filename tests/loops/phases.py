"""Phases of a run: freezing and unfreezing, folds, and passes that an exception ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.loops.net import Net, adam, evaluate, layers, loss_of, started, train
from tests.loops.run import WHOLE, Run, loop


@loop()
def unfreezing_in_phases(run: Run) -> None:
    """The head alone; after an evaluation the embedding too; then everything."""
    model, optimizer = started(run)
    model.requires_grad_(False)
    for chosen in (run.unwrap(model).head, run.unwrap(model).embed, model):
        chosen.requires_grad_(True)
        train(run, model, optimizer)
        evaluate(run, model)


@loop()
def frozen_whole_at_first(run: Run) -> None:
    model = Net().requires_grad_(False)
    model = run.prepare(model)
    evaluate(run, model)
    model.requires_grad_(True)
    train(run, model, run.prepare(adam(model.parameters())))


@loop()
def freezing_again(run: Run) -> None:
    model, optimizer = started(run)
    train(run, model, optimizer)
    run.unwrap(model).embed.requires_grad_(False)
    run.unwrap(model).parts[1].requires_grad_(False)
    train(run, model, optimizer, 10)
    model.requires_grad_(True)
    train(run, model, optimizer, 20)


@loop()
def evaluated_in_inference_mode_after_freezing(run: Run) -> None:
    model, optimizer = started(run)
    train(run, model, optimizer)
    run.unwrap(model).head.requires_grad_(False)
    evaluate(run, model, torch.inference_mode)
    train(run, model, optimizer, 10)


@loop()
def folds(run: Run) -> None:
    """Cross-validation: the model is built anew, in one process."""
    for fold in range(2):
        torch.manual_seed(fold)
        model, optimizer = started(run)
        train(run, model, optimizer, 10 * fold)
        evaluate(run, model)
        if fold == 0:
            run.free()


@loop(accumulation=2)
def another_accelerator_goes_on(run: Run) -> None:
    """Libraries make one for each call of their train() or evaluate(), and give it the model of the call before."""
    model, optimizer = started(run)
    for phase in range(3):
        for step in range(run.steps):
            with run.accumulate(model):
                loss = loss_of(model, run.batch(10 * phase + step))
                run.backward(loss)
                if run.is_step:
                    run.clip(model.parameters(), 1.0)
                run.step(optimizer)
            run.see_mean(loss)
        run.start_again()
        model, optimizer = run.prepare(run.unwrap(model), optimizer)


IN_ANOTHER = {
    "fsdp": WHOLE,
    "refused": dict.fromkeys((1, 2, 4, 5, "xla"), "is already sharded"),
    "refused_alone": True,
}


def _fit(run: Run, model: nn.Module, optimizer: Any, first: int) -> None:
    for step in range(first, first + 3):
        loss = (model(run.draw(step, 5)) - 1).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop(**IN_ANOTHER)
def a_part_goes_on_in_another_model(run: Run) -> None:
    """Pretraining, a probe on what it has learned, and then the training of all, in one process."""
    torch.manual_seed(1)
    body = layers(5, 7, 6)
    model = nn.Sequential(body, nn.Linear(6, 4))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    _fit(run, model, optimizer, 0)
    run.free()
    body.requires_grad_(False)
    frozen = run.prepare(body)
    with torch.no_grad():
        run.see_mean(frozen(run.draw(9, 5)).mean())
    run.free()
    probe = nn.Sequential(body, nn.Linear(6, 3))
    probe, for_head = run.prepare(probe, adam(probe[1].parameters()))
    _fit(run, probe, for_head, 10)
    body.requires_grad_(True)
    _fit(run, probe, run.prepare(torch.optim.SGD(probe.parameters(), lr=0.1)), 20)


@loop(**IN_ANOTHER)
def a_part_of_two_models_in_turns(run: Run) -> None:
    """Each has an Accelerator of its own."""
    torch.manual_seed(1)
    body = layers(5, 7, 6)
    one, other = nn.Sequential(body, nn.Linear(6, 4)), nn.Sequential(body, nn.Linear(6, 3))
    one, for_one = run.prepare(one, torch.optim.SGD(one.parameters(), lr=0.1))
    _fit(run, one, for_one, 0)
    before = [*run.models]
    run.start_again()
    other, for_other = run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    for turn in range(2):
        _fit(run, other, for_other, 10 + 10 * turn)
        _fit(run, one, for_one, 50 + 10 * turn)
    run.models += before


@loop()
def a_forward_that_raised(run: Run) -> None:
    """An exception in the middle of forward, caught; the step is tried again."""
    model, optimizer = started(run)
    broken = run.unwrap(model).norm.register_forward_pre_hook(_raise_once())
    for step in range(run.steps):
        try:
            loss = loss_of(model, run.batch(step))
        except FloatingPointError:
            assert run.is_plain or not run.accelerator.use_distributed or all_whole_or_sharded(model)
            loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    broken.remove()


def all_whole_or_sharded(model: nn.Module) -> bool:
    return len({isinstance(p, DTensor) for p in model.parameters()}) == 1


def _raise_once() -> Callable[..., None]:
    raised: list[int] = []

    def hook(*_: Any) -> None:
        if not raised:
            raised.append(1)
            raise FloatingPointError("once")

    return hook


class RaisesOnce(torch.autograd.Function):
    raised: set[int] = set()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: int) -> torch.Tensor:
        ctx.key = key
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.key not in RaisesOnce.raised:
            RaisesOnce.raised.add(ctx.key)
            raise FloatingPointError("once")
        return gradients[0], None


@loop()
def a_backward_that_raised(run: Run) -> None:
    """An exception in the middle of backward, caught; gradients are dropped and the step is tried again."""
    model, optimizer = started(run)
    key = id(run)
    RaisesOnce.raised.discard(key)  # the id of an earlier run may come again
    handle = run.unwrap(model).norm.register_forward_pre_hook(lambda _, args: (RaisesOnce.apply(args[0], key),))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        try:
            run.backward(loss)
        except FloatingPointError:
            optimizer.zero_grad()
            loss = loss_of(model, run.batch(step))
            run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    handle.remove()
