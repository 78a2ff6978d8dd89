"""Random numbers that belong to the data: drawing an order or a stream leaves the script's own generators alone."""

import hashlib
import random
import sys
from typing import Any

import torch


def stream_seed(seed: int, part: int | str) -> int:
    """63 bits that depend on both, without a pattern between neighbours. `part`: an epoch, a rank, a position."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{part}".encode()).digest()[:8], "big") >> 1


class PrivateRandom:
    """Random generators of one stream. Inside `with`, Python's, numpy's and torch's CPU generator are the stream's own;
    outside they are what they were, so that reading data changes nothing that the model draws."""

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
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None


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
