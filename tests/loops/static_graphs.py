"""Loops with `shardkit.ddp.static_graph`: what torch's DDP learns in the first step has to hold for the others."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tests.loops.calls import recomputing_a_module_that_ran_twice
from tests.loops.net import loss_of, started, train
from tests.loops.run import BY_SIZE, Run, loop
from tests.loops.steps import gradient_penalty, gradient_penalty_alone
from tests.loops.tasks import heads_one_by_one, one_head_alone

STATIC: Any = {"ddp": {"static_graph": True}}


@loop(shardkit=STATIC)
def a_module_that_ran_twice_in_a_static_graph(run: Run) -> None:
    recomputing_a_module_that_ran_twice(run)


@loop(fsdp=BY_SIZE, shardkit=STATIC)
def a_gradient_penalty_in_a_static_graph(run: Run) -> None:
    """The first backward through the output is one of `torch.autograd.grad`."""
    gradient_penalty(run)


@loop(fsdp=BY_SIZE, shardkit=STATIC)
def a_gradient_penalty_alone_in_a_static_graph(run: Run) -> None:
    """The backward that leaves gradients does not go through the output."""
    gradient_penalty_alone(run)


@loop(fsdp=BY_SIZE, shardkit=STATIC)
def one_head_alone_in_a_static_graph(run: Run) -> None:
    """The other head is never used."""
    one_head_alone(run)


@loop(fsdp=BY_SIZE, shardkit=STATIC)
def heads_one_by_one_in_a_static_graph(run: Run) -> None:
    """The second backward is one that torch does not expect."""
    heads_one_by_one(run)


@loop(shardkit=STATIC)
def a_method_before_forward_in_a_static_graph(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(2):
        run.backward(run.unwrap(model).loss(run.batch(step)))
        run.step(optimizer)
    train(run, model, optimizer, 2)


@loop(shardkit=STATIC)
def no_sync_of_the_model_in_a_static_graph(run: Run) -> None:
    """As a script has it that is parallel by itself: torch requires that the first backward reduces."""
    model, optimizer = started(run)
    no_sync: Any = getattr(model, "no_sync", nullcontext)
    for step in range(run.steps):
        with no_sync():
            run.backward(loss_of(model, run.batch(step)) / 2)
        loss = loss_of(model, run.batch(step + 50)) / 2
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(accumulation=2, shardkit=STATIC)
def unfreezing_in_windows_with_a_static_graph(run: Run) -> None:
    """Another graph has to be learned, and the first micro-batch that has it does not reduce."""
    model, optimizer = started(run)
    for micro in range(10):
        if micro % 4 == 0:
            run.unwrap(model).embed.requires_grad_(micro == 4)
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)
