"""The matrix of loops: every loop of `tests/loops.py` on 1, 2, 3 and 4 ranks and all strategies is plain torch."""

import gc
import weakref
from functools import cache
from typing import Any

import numpy
import pytest

from shardkit import Accelerator
from tests import loops

STRATEGIES = (1, 2, 3, 4)


@cache
def reference(name: str) -> tuple[list[float], dict[str, Any]]:
    return loops.plain(name)


def compare(found: Any, expected: Any, bound: float, what: str) -> None:
    """Both are (what was seen, last weights)."""
    assert found[0] == pytest.approx(expected[0], abs=bound), what
    assert found[1].keys() == expected[1].keys(), what
    for name, weight in expected[1].items():
        assert numpy.abs(found[1][name] - weight).max(initial=0.0) < 2 * bound, f"{what}: {name}"


# Of these every quick run has a part.
QUICK = ("usual", "windows")


def _on_two_ranks(name: str) -> list[tuple[tuple[int, ...], Any]]:
    """Strategies and marks: in `make test` the quick ones under all strategies, most others under 1 and 3."""
    if name in QUICK:
        return [((1, 2, 3, 4), ())]
    usual = pytest.mark.loops if loops.LOOPS[name].is_long_run_only else pytest.mark.slow
    return [((1, 3), usual), ((2, 4), pytest.mark.loops)]


def cases() -> list[Any]:
    """Most loops on two ranks in `make test`; the others, and all on other numbers of ranks, in `make test-loops`."""
    on_others = [(1, (1, 3)), (3, (1, 2, 3, 4)), (4, (1, 3, 4, 5))]
    return [
        pytest.param(name, world, strategies, id=f"{name}-{world}-{''.join(map(str, strategies))}", marks=marks)
        for name, loop in loops.LOOPS.items()
        for world, all_strategies, marks in (
            *((2, strategies, marks) for strategies, marks in _on_two_ranks(name)),
            *((world, strategies, pytest.mark.loops) for world, strategies in on_others),
        )
        if (strategies := tuple(one for one in all_strategies if one != 3 or not loop.is_for_shards))
    ]


@pytest.mark.requirement("U2")
@pytest.mark.parametrize(("name", "world", "strategies"), cases())
def test_a_loop_is_that_of_one_process(ranks, name, world, strategies):
    expected = reference(name)
    for rank, found in enumerate(ranks.run(world, loops.on_ranks, name, strategies)):
        for strategy, result in found.items():
            if not isinstance(result, str):  # refused, as it is to be
                place = f"{name}, strategy {strategy}, rank {rank} of {world}"
                compare(result, expected, loops.LOOPS[name].bound, place)


def alive_after(strategy: int) -> list[bool]:
    """Whether the run's objects outlive it."""
    accelerator = Accelerator(config=loops.config_of(strategy, loops.LOOPS["usual"]))
    run = loops.RanksRun(accelerator=accelerator)
    loops.LOOPS["usual"].function(run)
    (model,) = run.models
    alive = [weakref.ref(accelerator), weakref.ref(model), weakref.ref(next(model.parameters()))]
    del run, accelerator, model
    gc.collect()
    return [reference() is not None for reference in alive]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_of_a_run_outlives_it(ranks, strategy):
    assert ranks.run(2, alive_after, strategy) == [[False] * 3] * 2
