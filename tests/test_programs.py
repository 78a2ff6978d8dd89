"""Random programs on ranks are those of plain torch in one process; `tests/loops/programs.py` has the operations."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest

from shardkit import Accelerator
from tests import loops
from tests.loops import programs
from tests.loops.run import Run, numbers

BOUND = 2e-4
# (ranks, strategies, seeds, marks)
CASES = [
    (2, (1, 3), range(8), pytest.mark.slow),
    (2, (1, 2, 3), range(8, 68), pytest.mark.loops),
    (3, (1, 3), range(68, 88), pytest.mark.loops),
    (4, (1, 4, 5), range(88, 118), pytest.mark.loops),
]


@cache
def reference(seed: int) -> tuple[list[str], list[float], dict[str, Any]]:
    run = Run(accumulation=programs.settings_of(seed).accumulation)
    said = programs.program(run, seed, Path())
    return said, run.seen, numbers(run)


def on_ranks(seed: int, strategies: tuple[int, ...], folder: Path) -> dict[int, tuple[list[float], dict[str, Any]]]:
    settings, found = programs.settings_of(seed), {}
    for strategy in strategies:
        accelerator = Accelerator(config=loops.config_of(strategy, settings))
        run = loops.RanksRun(accelerator=accelerator, accumulation=settings.accumulation)
        programs.program(run, seed, folder / str(strategy))
        found[strategy] = run.seen, numbers(run)
        accelerator.free_memory()
    return found


@pytest.mark.parametrize(
    ("world", "strategies", "seed"),
    [pytest.param(world, strategies, seed, marks=marks) for world, strategies, seeds, marks in CASES for seed in seeds],
)
def test_a_random_program_is_that_of_one_process(ranks, tmp_path, world, strategies, seed):
    said, seen, weights = reference(seed)
    for rank, found in enumerate(ranks.run(world, on_ranks, seed, strategies, tmp_path)):
        for strategy, (theirs, their_weights) in found.items():
            where = f"seed {seed}, strategy {strategy}, rank {rank} of {world}"
            assert len(theirs) == len(seen), where
            for mine, expected, what in zip(theirs, seen, said, strict=True):
                assert mine == pytest.approx(expected, rel=BOUND, abs=BOUND), f"{where}: {what}"
            for name, weight in weights.items():
                assert numpy.abs(their_weights[name] - weight).max() < BOUND, f"{where}: {name}"
