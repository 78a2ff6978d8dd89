"""Steps of optimizers whose state is in host memory between steps (`shardkit.offload_optimizer`).

The state is on the device only while the optimizer steps: of elementwise optimizers, that of a chunk of parameters at a
time. A chunk reuses the device memory of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from shardkit.distributed import accelerators
from shardkit.distributed.host_memory import can_pin_for, copied_to_device, copied_to_host, keeps_state_there
from shardkit.distributed.tensors import is_dtensor, local_part, sharded_like
from shardkit.optim import division
from shardkit.optim.kernels import parameters_of
from shardkit.optim.parts import is_row
from shardkit.optim.plain_step import Stepper
from shardkit.optim.step_hooks import Chunk, chunks_of, step_in_chunks, with_parameters


class StepWithState:
    """A step for which the whole state is copied to the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, inner: Stepper) -> None:
        self._optimizer, self._inner = optimizer, inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with finished_copies(), on_device(self._optimizer.state, parameters_of(self._optimizer)):
            return self._inner.step(closure)


class StepInChunks:
    """The own step of an elementwise optimizer with plain parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        chunks = partial(chunks_by_state, self._optimizer)
        return step_in_chunks(self._optimizer, chunks, self._on_chunk, closure, finished_copies)

    @contextmanager
    def _on_chunk(self, chunk: Chunk) -> Iterator[None]:
        with on_device(self._optimizer.state, chain(*chunk)), with_parameters(self._optimizer, chunk):
            yield


@contextmanager
def finished_copies() -> Iterator[None]:
    """Copies to host memory that are begun inside are finished afterwards, also after an error: the script may read
    them."""
    try:
        yield
    finally:
        accelerators.finish()


def move_to_host(optimizer: torch.optim.Optimizer) -> None:
    """Moves state that is on the device to host memory, if the optimizer keeps it there."""
    if not keeps_state_there(optimizer):
        return
    with finished_copies():
        for parameter in parameters_of(optimizer):
            row = optimizer.state.get(parameter, {})
            for name, value in row.items() if is_row(row) else ():
                if _is_kept_on_host(value) and value.device.type != "cpu":
                    row[name] = _with_part(value, copied_to_host(local_part(value)))


def chunks_by_state(optimizer: torch.optim.Optimizer) -> list[Chunk]:
    """The parameters whose state is on the device together: this rank's part of it is taken as two tensors of the
    parameter's shape and dtype, as Adam's."""
    return chunks_of(optimizer, lambda parameter: 2 * local_part(parameter).nbytes, division.STATE_BYTES)


@contextmanager
def on_device(state: MutableMapping[Any, Any], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the tensors of these parameters' state are on their device; afterwards in host memory, in the tensors
    that had them before. Numbers, such as the count of steps, stay where the optimizer has them."""
    parameters = list(parameters)
    homes = {p: _fetch(state[p], local_part(p).device) for p in parameters if is_row(state.get(p))}
    try:
        yield
    finally:
        for parameter in parameters:
            if is_row(state.get(parameter)):
                _put_back(state[parameter], homes.get(parameter, {}))


def _fetch(row: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies a parameter's state to the device, in place; returns the tensors in host memory by name."""
    homes = {name: value for name, value in row.items() if _is_kept_on_host(value) and value.device.type == "cpu"}
    for name, home in homes.items():
        row[name] = _with_part(home, copied_to_device(local_part(home), device))
    return homes


def _put_back(row: dict[str, Any], homes: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in row.items():
            if not _is_kept_on_host(value):
                continue
            part, home = local_part(value), homes.get(name)
            if home is not None and _can_hold(local_part(home), part):
                local_part(home).copy_(part, non_blocking=local_part(home).is_pinned())
                row[name] = home
            else:
                row[name] = _with_part(value, copied_to_host(part))


def _is_kept_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _can_hold(home: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether it can take the values; one that the script has put there may not be pinned."""
    return (home.shape, home.dtype, home.is_pinned()) == (part.shape, part.dtype, can_pin_for(part))


def _with_part(value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The tensor with another local part; of a plain one, this."""
    return sharded_like(part, value) if is_dtensor(value) else part
