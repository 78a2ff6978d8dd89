"""Seeds all random generators. (Their states: `distributed/random_state.py`.)"""

import hashlib
import random
import sys
from typing import Any

import torch

from shardkit.distributed import xla
from shardkit.distributed.collectives import rank
from shardkit.errors import UsageError


def stream_seed(seed: int, part: int | str) -> int:
    """A 63-bit seed that depends on both, uncorrelated between neighbouring parts. `part`: an epoch, a rank, a
    position."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{part}".encode()).digest()[:8], "big") >> 1


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds Python, NumPy (if imported) and torch on all devices; with `device_specific`, seed + rank. With
    `deterministic` torch uses deterministic algorithms from now on, and raises an error where it has none.

    Use the same seed on every rank unless ranks should differ in dropout or augmentation. The order of the data is
    the same on all ranks in any case: it follows rank 0's seed, where neither the loader nor shardkit.seed has one.
    """
    if not hasattr(seed, "__index__"):
        raise UsageError(
            f"set_seed: the seed must be an integer (got {seed!r}); convert it, as by type=int of argparse, or, "
            "where there is none, leave out this call."
        )
    seed = seed.__index__()  # Python's generator takes no integer of NumPy
    if device_specific:
        seed += rank()
    seed_generators(seed, seed, seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def seed_generators(of_python: int, of_numpy: int, of_torch: int) -> None:
    """Seeds the generators of Python, NumPy (if imported) and torch on all devices."""
    random.seed(of_python)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(of_numpy % 2**32)
    torch.manual_seed(of_torch % 2**64)
    xla.seed(of_torch)
