"""Trainings that are saved before every step, and go on from each of these places in new objects: plain torch's."""

from functools import cache
from typing import Any

import numpy
import pytest

from tests.loops import resumed

USUAL = ("clipped_and_scheduled", "in_windows", "two_optimizers", "evaluated")
REPLICATED_TOO = ("clipped_and_scheduled", "sharpness_aware")
ON_OTHERS = ("clipped_and_scheduled", "two_optimizers", "with_averages", "with_adafactor")


@cache
def reference(name: str) -> Any:
    return resumed.straight(name)


def compare(found: Any, name: str, first: int, what: str) -> None:
    seen, weights = reference(name)
    assert len(found[0]) == len(seen) - first
    for mine, expected in zip(found[0], seen[first:], strict=True):
        assert mine == pytest.approx(expected, abs=3e-5), what
    for fqn, weight in weights.items():
        assert numpy.abs(found[1][fqn] - weight).max() < 6e-5, f"{what}: {fqn}"


def cases() -> list[Any]:
    """Some trainings under strategy 1, and two under 3, in `make test`; the others in `make test-loops`."""

    def marks(name: str, strategy: int) -> Any:
        is_usual = name in {1: USUAL, 3: REPLICATED_TOO}.get(strategy, ())
        return pytest.mark.slow if is_usual else pytest.mark.loops

    return [
        pytest.param(name, strategy, id=f"{name}-{strategy}", marks=marks(name, strategy))
        for name in resumed.TRAININGS
        for strategy in (1, 2, 3, 4)
    ]


@pytest.mark.requirement("U2")
@pytest.mark.parametrize(("name", "strategy"), cases())
def test_a_training_goes_on_from_every_place(ranks, tmp_path, name, strategy):
    for rank, found in enumerate(ranks.run(2, resumed.saved_everywhere, name, strategy, tmp_path)):
        compare(found, name, 0, f"rank {rank} not interrupted")
    for rank, all_found in enumerate(ranks.run(2, resumed.resumed_everywhere, name, strategy, tmp_path)):
        for first, found in enumerate(all_found):
            compare(found, name, first, f"rank {rank} from step {first}")


@pytest.mark.loops
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(1, 3), (2, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("name", ON_OTHERS)
def test_a_training_goes_on_on_another_number_of_ranks(ranks, tmp_path, name, saved_on, resumed_on):
    for strategy in (1, 3):
        folder = tmp_path / str(strategy)
        ranks.run(saved_on, resumed.saved_everywhere, name, strategy, folder)
        for rank, found in enumerate(ranks.run(resumed_on, resumed.resumed, name, strategy, folder, 2)):
            compare(found, name, 2, f"strategy {strategy}, rank {rank} of {resumed_on}")
