"""Loops over several loaders at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from typing import Any

from tests.loops.net import loss_of, started
from tests.loops.run import BATCH, Run, loop


def _loaders(run: Run, *batches: int) -> list[Any]:
    return [run.prepare(run.loader(BATCH * number)) for number in batches]


def _train(run: Run, pairs: Callable[[], Iterable[tuple[Any, Any]]]) -> None:
    """Labeled and unlabeled samples, as in semi-supervised learning, in windows."""
    model, optimizer = started(run)
    for labeled, other in pairs():
        with run.accumulate(model):
            loss = loss_of(model, labeled) + 0.5 * loss_of(model, other)
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)


@loop(accumulation=2)
def two_loaders_of_a_length(run: Run) -> None:
    one, other = _loaders(run, 4, 4)
    _train(run, lambda: zip(one, other, strict=True))


@loop(accumulation=2)
def a_short_loader_that_begins_again(run: Run) -> None:
    """Its end ends no window."""
    long, short = _loaders(run, 8, 3)

    def pairs() -> Iterator[tuple[Any, Any]]:
        again = iter(short)
        for _ in range(2):
            for batch in long:
                try:
                    other = next(again)
                except StopIteration:
                    again = iter(short)
                    other = next(again)
                yield batch, other

    _train(run, pairs)


@loop(accumulation=2)
def a_short_loader_whose_batches_are_kept(run: Run) -> None:
    long, short = _loaders(run, 8, 3)
    _train(run, lambda: zip(long, cycle(short), strict=False))
