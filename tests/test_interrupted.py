"""Trainings with looks, evaluations, saves and cuts at random places train on what one without them does."""

import pytest

from tests.loops import interrupted

SEEDS = {1: range(3), 2: range(3, 5)}
"""By the number of ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("name", interrupted.KINDS)
def test_an_interrupted_training_is_the_one_without_interruption(ranks, tmp_path, name):
    for world, seeds in SEEDS.items():
        for found in ranks.run(world, interrupted.all_interrupted, name, seeds, tmp_path):
            assert not found, found[0]
