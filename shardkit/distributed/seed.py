"""Seeding every random generator that a script draws from. (Their states: `checkpoint/random_state.py`.)"""

import random
import sys
from typing import Any

import torch

from shardkit.distributed import xla
from shardkit.distributed.collectives import rank


def set_seed(seed: int, device_specific: bool = False) -> None:
    """Seed Python, NumPy (when it is loaded) and torch, all devices; with `device_specific` each rank by its own.

    Give every rank the same seed unless ranks are meant to differ in dropout or augmentation. The order of the data
    never depends on a rank's own seed: it is rank 0's.
    """
    if device_specific:
        seed += rank()
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)
    xla.seed(seed)
