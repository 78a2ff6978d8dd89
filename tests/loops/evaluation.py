"""Evaluations at every place of a step, and other forwards that no backward follows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tests.loops.net import Net, adam, evaluate, loss_of, started, train
from tests.loops.run import BATCH, BY_SIZE, LOOPS, Loop, Run, loop


def _evaluations(context: Any) -> Any:
    """An evaluation at every place of a step."""

    def everywhere(run: Run) -> None:
        model, optimizer = started(run)
        evaluate(run, model, context)
        for step in range(run.steps):
            evaluate(run, model, context)
            loss = loss_of(model, run.batch(step))
            evaluate(run, model, context)
            run.backward(loss)
            evaluate(run, model, context)
            run.clip(model.parameters(), 1.0)
            evaluate(run, model, context)
            optimizer.step()
            evaluate(run, model, context)
            optimizer.zero_grad()
            evaluate(run, model, context)
            run.see_mean(loss)
        evaluate(run, model, context)

    return everywhere


LOOPS["evaluations_without_grad"] = Loop(_evaluations(torch.no_grad))


LOOPS["evaluations_in_inference_mode"] = Loop(_evaluations(torch.inference_mode))


LOOPS["evaluations_with_grad"] = Loop(_evaluations(nullcontext))


@loop()
def evaluations_on_whole_weights(run: Run) -> None:
    """At each place of a step where weights do not change, and around a forward and its backward."""
    model, optimizer = started(run)
    for step in range(run.steps):
        with run.unsharded(model):
            evaluate(run, model)
            evaluate(run, model, torch.inference_mode)
            loss = loss_of(model, run.batch(step))
            evaluate(run, model)
            run.backward(loss)
            evaluate(run, model)
        second = loss_of(model, run.batch(step + 10))
        with run.unsharded(model):
            evaluate(run, model)
        run.backward(second)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        with run.unsharded(model):
            evaluate(run, model)
        run.see_mean(loss)


@loop()
def optimizer_built_after_an_evaluation(run: Run) -> None:
    model = run.prepare(Net())
    evaluate(run, model)
    optimizer = run.prepare(adam(model.parameters()))
    train(run, model, optimizer)


@loop()
def optimizer_built_after_a_forward_with_grad(run: Run) -> None:
    model = run.prepare(Net())
    loss_of(model, run.batch(5))
    optimizer = run.prepare(adam(model.parameters()))
    train(run, model, optimizer)


@loop()
def the_model_is_its_own_teacher(run: Run) -> None:
    """A forward without gradients, of the same model, between a forward with them and its backward."""
    model, optimizer = started(run)
    for step in range(run.steps):
        logits = model(run.batch(step))
        with torch.no_grad():
            target = model(run.batch(step + 50))
        loss = (logits - target).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def teacher_and_student(run: Run) -> None:
    """The teacher is frozen, prepared too, and run with gradients enabled."""
    teacher, student = Net().requires_grad_(False), Net()
    teacher, student, optimizer = run.prepare(teacher, student, adam(student.parameters()))
    for step in range(run.steps):
        tokens = run.batch(step)
        loss = (student(tokens) - teacher(tokens)).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def gradients_of_inputs_without_a_step(run: Run) -> None:
    """Saliency between training steps: the gradient of a gradient is never used."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).requires_grad_()
        for create_graph in (False, True):
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
            run.see_mean(gradient.pow(2).mean())
        loss = model(x.detach()).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def an_evaluation_before_the_second_backward(run: Run) -> None:
    """The graph of a gradient keeps what it needs, while the model is evaluated, read and averaged."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    averages = [p.detach().clone() for p in model.parameters()]
    for step in range(run.steps):
        x = run.draw(step, 5).requires_grad_()
        value = model(x)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        loss = value.pow(2).mean() + gradient.pow(2).sum(1).mean()
        for average, p in zip(averages, model.parameters(), strict=True):
            average.lerp_(p.detach(), 0.5)
        with torch.no_grad():
            run.see_mean(model(run.draw(777, 5)).mean())
        model.state_dict()
        if step % 2:
            run.backward(loss, retain_graph=True)
            with torch.no_grad():
                run.see_mean(model(run.draw(777, 5)).mean())
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    run.see(averages[0].sum())
