"""Scripts that were parallel by hand, and still call torch.distributed's collectives after `prepare`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from tests.loops.net import loss_of, started
from tests.loops.run import Run, loop


def average(tensors: Iterable[torch.Tensor]) -> None:
    """Over the ranks, in place."""
    if dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()


@loop()
def gradients_averaged_by_hand(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        average(p.grad.data for p in model.parameters() if p.grad is not None)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def gradients_averaged_as_one_tensor(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        flat = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
        average([flat])
        at = 0
        for p in model.parameters():
            if p.grad is not None:
                p.grad.data.copy_(flat[at : at + p.numel()].view_as(p.grad))
                at += p.numel()
        run.step(optimizer)
        run.see_mean(loss)


@loop(accumulation=2)
def weights_made_equal_by_hand(run: Run) -> None:
    """After prepare by a broadcast, in training by a maximum and a mean; one of them is waited for later."""
    model, optimizer = started(run)
    if dist.is_initialized():
        for value in model.state_dict().values():
            dist.broadcast(value, 0)
    for micro in range(6):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
        run.see_mean(loss)
        if dist.is_initialized():
            pending = [dist.all_reduce(p.data, dist.ReduceOp.MAX, async_op=True) for p in model.parameters()]
            for work in pending:
                work.wait()
        average(p.data for p in model.parameters())
