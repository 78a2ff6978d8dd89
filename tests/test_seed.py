"""Seeds of random generators."""

import random

import numpy
import pytest
import torch

from shardkit.distributed import random_state
from shardkit.distributed.seed import set_seed
from shardkit.errors import UsageError
from tests.ranks import log_lines


@pytest.fixture(autouse=True)
def _generators_are_restored():
    found = random_state.capture(0)
    yield
    random_state.restore(found)


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(numpy.random.normal()), float(torch.rand(()))]


def test_a_seed_fixes_every_generator():
    set_seed(7)
    first = draw()
    draw()
    set_seed(7)
    assert draw() == first
    set_seed(8)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_issue_9_3_the_largest_seed_may_still_differ_by_rank(monkeypatch):
    monkeypatch.setattr("shardkit.distributed.seed.rank", lambda: 3)
    set_seed(2**64 - 1, device_specific=True)
    assert torch.initial_seed() == 2


@pytest.mark.parametrize("seed", [None, "42", 42.0])
def test_a_seed_that_is_no_integer_is_refused_before_any_generator_has_it(seed):
    """As of a script's flag that was left out, or has no type=int."""
    before = random.getstate()
    with pytest.raises(
        UsageError, match=r"set_seed: the seed must be an integer \(got .*\); convert it, as by type=int"
    ):
        set_seed(seed, device_specific=True)
    assert random.getstate() == before
    set_seed(numpy.int64(42))


def test_deterministic_algorithms_are_used_where_that_is_asked_for():
    set_seed(5)
    assert not torch.are_deterministic_algorithms_enabled()
    set_seed(5, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_bit_generator_of_numpy_is_told_and_not_saved():
    found = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        with log_lines() as lines:
            assert "numpy" not in random_state.capture(0)
    finally:
        numpy.random.set_bit_generator(found)
    assert len(lines) == 1 and "has another generator than its own (got PCG64)" in lines[0]


def seed_by_rank():
    set_seed(5)
    same = float(torch.rand(()))
    set_seed(5, device_specific=True)
    return same, float(torch.rand(()))


def test_device_specific_seeds_differ_by_rank(ranks):
    (same_0, own_0), (same_1, own_1) = ranks.run(2, seed_by_rank)
    assert same_0 == same_1 == own_0 != own_1
