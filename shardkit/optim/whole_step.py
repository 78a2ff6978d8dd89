"""Steps of optimizers that need whole tensors, on every rank the same.

Parameters, gradients and state are gathered, a chunk at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardkit.distributed.tensors import is_dtensor, local_part, own_part, whole
from shardkit.optim import division
from shardkit.optim.parts import has_shape_of, is_row, make_gradient_plain, sharded_part
from shardkit.optim.step_hooks import Chunk, chunks_of, step_in_chunks, with_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class WholeStep:
    """The optimizer's own step on whole parameters and gradients, a chunk at a time, the same on every rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return step_in_chunks(self._optimizer, self._chunks, self._on_whole, closure)

    def _chunks(self) -> list[Chunk]:
        """Of each chunk, whole parameters and gradients take about WHOLE_BYTES."""
        return chunks_of(self._optimizer, lambda p: 2 * p.numel() * p.element_size(), division.WHOLE_BYTES)

    @contextmanager
    def _on_whole(self, chunk: Chunk) -> Iterator[None]:
        """Inside, the optimizer has the chunk's parameters as full tensors, whose values are then written back."""
        state = self._optimizer.state
        whole = {p: _whole(p) for of_group in chunk for p in of_group}
        own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        own.update({whole[p]: _whole_row(state[p], whole[p].device) for p in whole if p in state})
        try:
            self._optimizer.state = own
            with with_parameters(self._optimizer, [[whole[p] for p in of_group] for of_group in chunk]):
                yield
        finally:
            self._optimizer.state = state
        with torch.no_grad():
            for parameter, value in whole.items():
                if is_dtensor(parameter):
                    local_part(parameter).copy_(own_part(value, parameter))
                if value in own:
                    state[parameter] = _kept_row(own[value], state.get(parameter), parameter)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """The full parameter with its full gradient; a plain one is returned unchanged. Collective where it is sharded."""
    if not is_dtensor(parameter):
        make_gradient_plain(parameter)
        return parameter
    with torch.no_grad():
        value = whole(parameter)
        value.grad = whole(parameter.grad) if is_dtensor(parameter.grad) else parameter.grad
    return value


def _whole_row(row: Any, device: torch.device) -> Any:
    """A parameter's state with full tensors, on the device of the full parameter: that of an offloaded one is in host
    memory. Collective where some are sharded."""
    if not is_row(row):
        return row
    full = {name: whole(value) if is_dtensor(value) else value for name, value in row.items()}
    has_dims = {name for name, value in full.items() if isinstance(value, torch.Tensor) and value.dim()}
    return {name: value.to(device) if name in has_dims else value for name, value in full.items()}


def _kept_row(row: Any, before: Any, parameter: torch.Tensor) -> Any:
    """A parameter's state as it is kept between steps: what has the parameter's shape is sharded as the parameter is,
    in the tensors of `before`, if there are such. Rows and columns are kept whole."""
    if not (is_row(row) and is_dtensor(parameter)):
        return row
    earlier = before if is_row(before) else {}
    return {
        name: _kept(value, earlier.get(name), parameter) if has_shape_of(value, parameter) else value
        for name, value in row.items()
    }


def _kept(value: torch.Tensor, before: Any, parameter: DTensor) -> Any:
    if not (is_dtensor(before) and before.placements == parameter.placements):
        return sharded_part(value, parameter)
    local_part(before).copy_(own_part(value, parameter))
    return before
