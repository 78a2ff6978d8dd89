"""The random generator states of one rank as JSON values: Python, numpy (if imported), torch on CPU and device."""

import base64
import hashlib
import random
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardkit.distributed import accelerators
from shardkit.distributed.control import ControlGroup
from shardkit.distributed.seed import seed_generators, stream_seed
from shardkit.log import get_logger

log = get_logger(__name__)

GENERATORS = ("python", "numpy", "torch")


@dataclass(frozen=True)
class States:
    """The states of a process's generators, as each library gives its own."""

    of_python: Any
    of_torch: torch.Tensor
    of_device: tuple[str, torch.Tensor] | None
    of_numpy: dict[str, Any] | None


def take() -> States:
    """The present states: some microseconds, without a wait for the device."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
    return States(random.getstate(), torch.get_rng_state(), accelerators.random_state(), of_numpy)


def capture(rank: int, states: States | None = None) -> dict[str, Any]:
    """The state of every generator, or these `states`."""
    states = states or take()
    version, numbers, gauss = states.of_python
    state: dict[str, Any] = {
        "rank": rank,
        "python": [version, _packed(numbers), gauss],
        "torch": _text(states.of_torch),
        "cuda": [],
    }
    if states.of_device is not None:
        kind, stands = states.of_device
        state[kind] = [_text(stands)]
    if states.of_numpy is not None:
        kind, inner = states.of_numpy["bit_generator"], states.of_numpy["state"]
        if kind == "MT19937":
            has_gauss, cached = int(states.of_numpy["has_gauss"]), float(states.of_numpy["gauss"])
            state["numpy"] = [kind, _packed(inner["key"]), int(inner["pos"]), has_gauss, cached]
        else:
            _tell_of_other_generator(kind)
    return state


@cache
def _tell_of_other_generator(name: str) -> None:
    log.warning(
        "random state: numpy.random has another generator than its own (got %s), whose state is not saved: a resumed "
        "run draws other numbers from it. Leave numpy.random.set_bit_generator out, or draw from a Generator of your "
        "own in an object given to register_for_checkpointing.",
        name,
    )


def _packed(numbers: Iterable[int]) -> str:
    """32-bit integers as base64 text."""
    return base64.b64encode(b"".join(int(number).to_bytes(4, "little") for number in numbers)).decode()


def _numbers(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text, validate=True)
    return tuple(int.from_bytes(data[begin : begin + 4], "little") for begin in range(0, len(data), 4))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def check(state: dict[str, Any]) -> None:
    """Raises ValueError, TypeError, KeyError or RuntimeError where a captured state is invalid."""
    torch.Generator().set_state(_tensor(state["torch"]))
    version, numbers, gauss = state["python"]
    random.Random().setstate((version, _numbers(numbers), gauss))
    for text in state.get(accelerators.kind() or "", []):
        _tensor(text)
    if "numpy" in state:
        import numpy

        numpy.random.RandomState().set_state(_of_numpy(state["numpy"]))


def restore(state: dict[str, Any]) -> None:
    """Restores every generator."""
    version, numbers, gauss = state["python"]
    random.setstate((version, _numbers(numbers), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    on_device = state.get(accelerators.kind() or "", [])
    if on_device:
        accelerators.set_random_state(_tensor(on_device[0]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_of_numpy(state["numpy"]))


def _of_numpy(state: Any) -> tuple[Any, ...]:
    """A captured state as numpy takes it."""
    import numpy

    name, keys, position, has_gauss, cached = state
    return name, numpy.array(_numbers(keys), dtype=numpy.uint32), position, has_gauss, cached


def derive(seed: int, step: int, rank: int, alike: Collection[str] = ()) -> None:
    """Seeds the generators from (seed, step, rank), those in `alike` as rank 0's."""
    seed_generators(*(stream_seed(seed, f"{step}:{0 if name in alike else rank}") for name in GENERATORS))


def derive_together(seed: int, step: int, control: ControlGroup) -> None:
    """The same, for a resume on a different number of ranks: generators that stand alike on all ranks do so
    afterwards, since a script may decide by their numbers (the next task, a layer to drop). Collective."""
    alike = control.decide(_fingerprints(), _alike)
    derive(seed, step, control.rank, alike)


def _fingerprints() -> dict[str, str]:
    """A digest of the state of each generator of Python, numpy (if imported) and torch (on CPU)."""
    state = capture(0)
    found = {name: state[name] for name in GENERATORS if name in state}
    return {name: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for name, value in found.items()}


def _alike(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """The generators with one fingerprint on all ranks."""
    return [name for name in GENERATORS if len({one.get(name, "") for one in of_ranks}) == 1]
