"""Random generators of the data alone: drawing an order or reading a stream does not touch the script's generators."""

import random
import sys
from typing import Any

import torch


class PrivateRandom:
    """Random generators of one stream. Inside `with`, the generators of Python, numpy and torch (CPU) have the stream's
    state; afterwards they are restored, so that reading data does not change the model's random draws."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: tuple[Any, ...] | None = None
        self._found: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        self._found.append(_random_states())
        if self._own is None:
            _seed_all(self._seed)
        else:
            _set_random_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _random_states()
        _set_random_states(self._found.pop())


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False) if numpy else None


def _set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy = sys.modules.get("numpy")
    if numpy and states[2] is not None:
        numpy.random.set_state(states[2])


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
