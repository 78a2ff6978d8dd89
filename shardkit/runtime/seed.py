"""Random generators: seeding all of them, and their states as plain JSON for a checkpoint."""

import base64
import random
import sys
from typing import Any

import torch

from shardkit.runtime.collectives import rank


def set_seed(seed: int, device_specific: bool = False) -> None:
    """Seed Python, NumPy (when it is loaded) and torch, all devices; with `device_specific` each rank by its own.

    Give every rank the same seed unless ranks are meant to differ in dropout or augmentation. The order of the data
    never depends on a rank's own seed: it is rank 0's.
    """
    if device_specific:
        seed += rank()
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of every generator that this process uses, JSON-able; `restore_random_state` takes it back."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch_cpu": _text(torch.get_rng_state()),
    }
    numpy = _numpy()
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["torch_cuda"] = _text(torch.cuda.get_rng_state())
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every generator back to where `random_state` saw it. What is not in `state` stays as it is."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_tensor(state["torch_cpu"]))
    if "numpy" in state and (numpy := _numpy(load=True)) is not None:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype="uint32"), position, has_gauss, cached))
    if "torch_cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["torch_cuda"]))


def _numpy(load: bool = False) -> Any:
    """NumPy where the process has loaded it, or can when `load`; None otherwise."""
    if load:
        try:
            import numpy  # noqa: F401
        except ImportError:
            return None
    return sys.modules.get("numpy")


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
