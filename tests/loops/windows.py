"""Windows of micro-batches: full ones, short ones, ones that the loop leaves, and what happens inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.functional import softplus

from tests.loops.net import Net, adam, evaluate, loss_of, started
from tests.loops.run import Run, loop

# From torch 2.15 on these are reduced between the replicas, too.
REDUCES_UNREACHED = hasattr(FSDPParamGroup, "_get_partial_reduce_grad")
UNREDUCED = {} if REDUCES_UNREACHED else dict.fromkeys((4, 5), "units that no backward in it reached")


@loop(accumulation=3)
def windows(run: Run) -> None:
    model, optimizer = started(run)
    for micro in range(9):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            if run.is_step:
                run.clip(model.parameters(), 1.0)
            run.step(optimizer)
            run.see_mean(loss)


def _zeroed_by_the_model(set_to_none: bool) -> Callable[[Run], None]:
    def zeroed(run: Run) -> None:
        """zero_grad() of the optimizer in every micro-batch, and of the model after the window's last."""
        model, optimizer = started(run)
        for micro in range(9):
            with run.accumulate(model):
                loss = loss_of(model, run.batch(micro))
                run.backward(loss)
                if run.is_step or not run.is_plain:
                    optimizer.step()
                if run.is_step:
                    model.zero_grad(set_to_none=set_to_none)
                elif not run.is_plain:
                    optimizer.zero_grad(set_to_none=set_to_none)
                run.see_mean(loss)

    return zeroed


for _sets_none in (True, False):
    loop(f"windows_zeroed_by_the_model_{_sets_none}", accumulation=3)(_zeroed_by_the_model(_sets_none))


class Around(nn.Module):
    """A module around a prepared model, as of a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@loop(accumulation=2)
def windows_of_a_module_around_the_model(run: Run) -> None:
    model, optimizer = started(run)
    around = Around(model)
    for micro in range(6):
        with run.accumulate(around):
            loss = loss_of(around.inner, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)


@loop(accumulation=2)
def windows_without_exchange_before_their_end(run: Run) -> None:
    model, optimizer = started(run)
    for micro in range(6):
        with run.accumulate(model), run.no_sync(model) if micro % 2 == 0 else nullcontext():
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)


@loop(accumulation=3)
def windows_with_evaluations(run: Run) -> None:
    model, optimizer = started(run)
    for micro in range(6):
        with run.accumulate(model):
            evaluate(run, model)
            loss = loss_of(model, run.batch(micro))
            evaluate(run, model)
            run.backward(loss)
            evaluate(run, model)
            run.step(optimizer)
            run.see_mean(loss)


@loop(accumulation=3)
def backward_by_hand_in_windows(run: Run) -> None:
    """`loss.backward()` is not divided: the window's gradient is a sum."""
    model, optimizer = started(run)
    for micro in range(9):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            loss.backward()
            run.step(optimizer)
            run.see_mean(loss)


@loop(accumulation=2)
def backward_by_hand_with_zero_grad_at_the_start(run: Run) -> None:
    model, optimizer = started(run)
    for micro in range(8):
        with run.accumulate(model):
            if not run.is_plain or micro % 2 == 0:
                optimizer.zero_grad()
            loss = loss_of(model, run.batch(micro))
            loss.backward()
            if not run.is_plain or run.is_step:
                optimizer.step()
            run.see_mean(loss)


def _with_two_optimizers(run: Run) -> tuple[nn.Module, Any, Any]:
    """A model, and an optimizer each for its matrices and its vectors."""
    model = Net()
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() == 1]
    return run.prepare(model, adam(wide), torch.optim.SGD(flat, lr=0.1))


@loop(accumulation=2)
def two_optimizers_in_windows(run: Run) -> None:
    model, first, second = _with_two_optimizers(run)
    for micro in range(8):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(first, second)
            run.see_mean(loss)


@loop(accumulation=2)
def gradients_of_an_optimizer_that_did_not_step(run: Run) -> None:
    """The second steps in every other window; what it did not use is dropped after the window."""
    model, first, second = _with_two_optimizers(run)
    for micro in range(8):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(first, *([second] if micro % 4 == 3 else []))
        if run.is_step:
            second.zero_grad()
        run.see_mean(loss)


class Part(nn.Sequential):
    """A unit."""


def _adversaries(zero: str) -> Callable[[Run], None]:
    def adversaries(run: Run) -> None:
        """The maker's loss reaches the judge's parameters after the judge's step: zero_grad drops these gradients."""
        torch.manual_seed(0)
        maker = nn.Sequential(Part(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6))
        judge = nn.Sequential(Part(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1))
        maker, judge, makes, judges = run.prepare(maker, judge, adam(maker.parameters()), adam(judge.parameters()))

        def zeroed(when: str, *optimizers: torch.optim.Optimizer) -> None:
            for optimizer in optimizers if when == zero and not run.is_plain else ():
                optimizer.zero_grad()

        def step(optimizer: torch.optim.Optimizer) -> None:
            if run.is_step or not run.is_plain:
                optimizer.step()
            if run.is_step and run.is_plain:
                optimizer.zero_grad()

        for micro in range(8):
            true = run.batch(micro).float() / 11
            with run.accumulate(maker, judge):
                zeroed("at the start", judges, makes)
                zeroed("first", judges)
                made = maker(true.flip(-1))
                loss = softplus(judge(made.detach())).mean() + softplus(-judge(true)).mean()
                run.backward(loss)
                step(judges)
                zeroed("after", judges)
                zeroed("first", makes)
                other = softplus(-judge(made)).mean()
                if run.is_plain:
                    run.backward(other, inputs=[*maker.parameters()])
                else:
                    run.backward(other)
                step(makes)
                zeroed("after", makes, judges)
                zeroed("at the end", makes, judges)
                run.see_mean(loss + other)

    return adversaries


for _when in ("at the start", "first", "after", "at the end"):
    loop(f"adversaries_in_windows_zeroed_{_when.replace(' ', '_')}", accumulation=2)(_adversaries(_when))


@loop(accumulation=3)
def phases_in_windows(run: Run) -> None:
    """One model learns for two windows, then the other. The first one's loss reaches the other's parameters, too:
    zero_grad of both after each step drops these gradients."""
    torch.manual_seed(0)
    maker = nn.Sequential(Part(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 6))
    judge = nn.Sequential(Part(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 1))
    maker, judge, makes, judges = run.prepare(maker, judge, adam(maker.parameters()), adam(judge.parameters()))
    for micro in range(12):
        true = run.batch(micro).float() / 11
        learns, steps = ((maker, makes), (judge, judges))[micro // 6]
        with run.accumulate(learns):
            loss = softplus(-judge(maker(true))).mean()
            if learns is judge:
                loss = softplus(judge(maker(true).detach())).mean() + softplus(-judge(true)).mean()
            run.backward(loss)
            if run.is_step or not run.is_plain:
                steps.step()
                makes.zero_grad()
                judges.zero_grad()
            run.see_mean(loss)


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@loop(accumulation=3)
def epochs_that_end_in_a_window(run: Run) -> None:
    """4 batches an epoch in windows of 3: the last window of an epoch has one micro-batch, and is a step."""
    model = Net()
    optimizer = adam(model.parameters())
    model, optimizer, schedule, loader = run.prepare(model, optimizer, _schedule(optimizer), run.loader(48))
    for _ in range(2):
        for number, batch in enumerate(loader):
            window = 1 if number == 3 else 3
            with run.accumulate(model):
                loss = loss_of(model, batch)
                if run.is_plain:
                    (loss / window).backward()
                else:
                    run.backward(loss)
                if not run.is_plain or number in (2, 3):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            run.see_mean(loss)


@loop(accumulation=2)
def an_optimizer_after_another(run: Run) -> None:
    """Of the same parameters; both are prepared. The last window of an epoch is short, and gradients are clipped."""
    model = Net()
    several = adam(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    model, *several, loader = run.prepare(model, *several, run.loader(36))
    for epoch in range(4):
        optimizer = several[epoch // 2]
        for number, batch in enumerate(loader):
            with run.accumulate(model):
                loss = loss_of(model, batch)
                if run.is_plain:
                    (loss if number == 2 else loss / 2).backward()
                else:
                    run.backward(loss)
                if number in (1, 2):
                    run.clip(model.parameters(), 0.5)
                if not run.is_plain or number in (1, 2):
                    optimizer.step()
                    optimizer.zero_grad()
            run.see_mean(loss)


def _schedule_by_epoch(run: Run, batches: Callable[[Any], Iterator[tuple[int, Any]]]) -> None:
    """The loop leaves each epoch in the middle of a window; the schedule moves once an epoch all the same."""
    model = Net()
    optimizer = adam(model.parameters())
    model, optimizer, schedule, loader = run.prepare(model, optimizer, _schedule(optimizer), run.loader(60))
    micro = 0
    for _ in range(3):
        for number, batch in batches(loader):
            micro += 1
            with run.accumulate(model):
                loss = loss_of(model, batch)
                run.backward(loss)
                if not run.is_plain or micro % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            run.see_mean(loss)
            if number == 3:
                break
        schedule.step()
        run.see(torch.tensor(schedule.get_last_lr()[0]))


@loop(accumulation=3)
def schedule_by_epoch_after_a_break(run: Run) -> None:
    _schedule_by_epoch(run, enumerate)


@loop(accumulation=3)
def schedule_by_epoch_with_an_iterator_that_is_kept(run: Run) -> None:
    """Somebody still refers to the iterator of the epoch, so that it is not closed by the break."""
    kept: list[Any] = []

    def batches(loader: Any) -> Iterator[tuple[int, Any]]:
        kept[:] = [enumerate(loader)]
        return kept[0]

    _schedule_by_epoch(run, batches)


@loop(accumulation=3)
def schedule_after_each_micro_batch(run: Run) -> None:
    """Outside of accumulate(), as some scripts write it: it moves once a window."""
    model = Net()
    optimizer = adam(model.parameters())
    model, optimizer, schedule, loader = run.prepare(model, optimizer, _schedule(optimizer), run.loader(72))
    for micro, batch in enumerate(loader, 1):
        with run.accumulate(model):
            run.backward(loss_of(model, batch))
            run.step(optimizer)
        if not run.is_plain or micro % 3 == 0:
            schedule.step()
        run.see(torch.tensor(schedule.get_last_lr()[0]))


@loop(accumulation=3, refused=UNREDUCED)
def the_rest_of_a_window_is_stepped_by_hand(run: Run) -> None:
    """After a `break` in the middle of a window, the script steps with what there is: its mean."""
    model = Net()
    model, optimizer, loader = run.prepare(model, adam(model.parameters()), run.loader(60))
    for _ in range(2):
        for number, batch in enumerate(loader):
            with run.accumulate(model):
                loss = loss_of(model, batch)
                if run.is_plain:
                    (loss / (3 if number < 3 else 1)).backward()
                else:
                    run.backward(loss)
                if not run.is_plain or number == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            if number == 3:
                break
        run.clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.see_mean(loss)


@loop()
def no_window_after_windows(run: Run) -> None:
    """Steps with and without accumulate() take turns."""
    model, optimizer = started(run)
    for step in range(6):
        if step % 2:
            with run.accumulate(model):
                loss = loss_of(model, run.batch(step))
                run.backward(loss)
                run.step(optimizer)
        else:
            loss = loss_of(model, run.batch(step))
            run.backward(loss)
            run.step(optimizer)
        run.see_mean(loss)


@loop(accumulation=3)
def a_forward_that_raised_in_a_window(run: Run) -> None:
    """The exception is caught; gradients of the micro-batches before it stay."""
    model, optimizer = started(run)
    for micro in range(6):
        with run.accumulate(model):
            if micro % 3 == 1:
                broken = run.unwrap(model).norm.register_forward_pre_hook(_raise)
                with suppress(FloatingPointError):
                    loss_of(model, run.batch(micro))
                broken.remove()
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)


def _raise(*_: Any) -> None:
    raise FloatingPointError("once")


def _last_loss_skipped(run: Run, accumulated: Callable[[nn.Module], nn.Module]) -> None:
    """As loops do with batches that they cannot use: the step has the gradients of the micro-batches before."""
    model, optimizer = started(run)
    for micro in range(6):
        with run.accumulate(accumulated(model)):
            if micro % 4 != 1:
                loss = loss_of(model, run.batch(micro))
                run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)


@loop(accumulation=2, refused=UNREDUCED)
def windows_whose_last_loss_is_skipped(run: Run) -> None:
    _last_loss_skipped(run, lambda model: model)


@loop(accumulation=2, refused=UNREDUCED, is_long_run_only=True)
def windows_of_a_module_around_whose_last_loss_is_skipped(run: Run) -> None:
    _last_loss_skipped(run, Around)


@loop(accumulation=2, refused=UNREDUCED)
def windows_that_end_without_a_part(run: Run) -> None:
    """The last micro-batch of each window leaves the first part out."""
    model, optimizer = started(run)
    inner: Any = run.unwrap(model)
    for micro in range(6):
        parts = inner.parts
        with run.accumulate(model):
            kept = parts[0].forward
            if micro % 2:
                parts[0].forward = lambda x: x
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)
            parts[0].forward = kept


@loop(accumulation=3, refused=UNREDUCED)
def parts_frozen_in_a_window(run: Run) -> None:
    """Their gradients of the micro-batches before are part of the step."""
    model, optimizer = started(run)
    for micro in range(6):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)
        if micro == 1:
            run.unwrap(model).parts[0].requires_grad_(False)


def _dropped(run: Run, split: Callable[[Net], tuple[list[nn.Parameter], list[nn.Parameter]]]) -> None:
    """The first window ends with a loss of the second model; zero_grad drops what there is of the first, too."""
    first, second = Net(), Net()
    ours, theirs = split(first)
    first, second, *optimizers = run.prepare(first, second, adam(ours), adam([*theirs, *second.parameters()]))
    for micro in range(6):
        with run.accumulate(first, second):
            model = second if micro == 1 else first
            loss = loss_of(model, run.batch(micro))
            run.backward(loss)
            if micro > 1:
                run.step(*optimizers)
            elif micro == 1:
                for optimizer in optimizers:
                    optimizer.zero_grad()
            run.see_mean(loss)


@loop(accumulation=2)
def gradients_of_a_window_dropped(run: Run) -> None:
    _dropped(run, lambda model: ([*model.parameters()], []))


@loop(
    accumulation=2,
    refused=dict.fromkeys((4, 5), "the optimizer has only some of its parameters"),
    is_long_run_only=True,
)
def gradients_of_a_window_dropped_by_two_optimizers(run: Run) -> None:
    _dropped(run, lambda model: ([*model.parameters()][::2], [*model.parameters()][1::2]))
