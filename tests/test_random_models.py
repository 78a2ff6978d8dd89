"""Models, optimizers, loops and strategies drawn from seeds: on two ranks as in plain torch."""

import pytest

from tests import random_models

SEEDS = 20


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 6 * SEEDS, SEEDS))
def test_what_is_drawn_from_a_seed_is_that_of_one_process(ranks, first):
    for seed in range(first, first + SEEDS):
        found, expected = ranks.run(2, random_models.on_ranks, seed)[0], random_models.in_plain_torch(seed)
        said = random_models.difference(found, expected)
        assert not said, f"{random_models.Drawn(seed)}: {said}"
