"""Scripts that were parallel by hand, and still call torch.distributed's collectives after `prepare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def trained(run: Run, make_equal: Callable[[list[torch.Tensor]], None]) -> None:
    """`make_equal` is called with the gradients, after each backward."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        make_equal([p.grad.data for p in model.parameters() if p.grad is not None])
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def gradients_averaged_by_hand(run: Run) -> None:
    trained(run, average)


@loop()
def gradients_averaged_as_one_tensor(run: Run) -> None:
    def average_flat(gradients: list[torch.Tensor]) -> None:
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        average([flat])
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()

    trained(run, average_flat)


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
