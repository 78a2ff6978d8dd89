"""Steps of elementwise optimizers on local tensors, without communication, at the cost of the kernels alone.

On DTensors, sharding propagation of foreach operators takes time quadratic in the number of tensors.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shardkit.distributed.host_memory import keeps_state_there
from shardkit.distributed.tensors import is_dtensor, local_part, memory_of, sharded_like
from shardkit.optim import host_state
from shardkit.optim.kernels import kind_of, laid_out_as, lay_out_gradient, parameters_of
from shardkit.optim.parts import has_shape_of, is_row, like_parameter, make_gradient_plain, part_of_whole
from shardkit.optim.step_hooks import Chunk, step_between_hooks, step_in_chunks, with_parameters, with_scale_beside

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""This rank's part of a tensor of the state, and its sharded form."""


class LocalStep:
    """The optimizer's own step on this rank's local tensors.

    The state that the kernels use is kept here, by local tensor. `optimizer.state` is its sharded form, by parameter.
    It is made on access, and is authoritative from then until the next step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._reference = weakref.ref(optimizer)  # the optimizer refers to this
        self._parts: dict[int, _Part] = {}
        self._local: Any = defaultdict(dict)
        self._shown: Any = optimizer.state  # from earlier steps, if any
        vars(optimizer).pop("state", None)
        self._is_ahead = False  # whether `_local` is newer than `_shown`
        self._is_seen = True  # whether `_shown` was accessed, and may have been changed
        self._pairs: dict[int, _Pair] = {}  # of the present state, by the id of either tensor
        _let_state_be_seen(optimizer, self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        optimizer = self._reference()
        assert optimizer is not None
        if not keeps_state_there(optimizer):
            return step_between_hooks(optimizer, partial(self._on_parts, optimizer), closure)
        chunks, on_chunk = partial(self._chunks, optimizer), partial(self._on_chunk, optimizer)
        result = step_in_chunks(optimizer, chunks, on_chunk, closure, host_state.finished_copies)
        self._forget_replaced()
        return result

    def _chunks(self, optimizer: torch.optim.Optimizer) -> list[Chunk]:
        for group in optimizer.param_groups:
            self._with_gradients(group["params"])  # the state is taken for all parts at once
        self._take_state(optimizer)
        return host_state.chunks_by_state(optimizer)

    @contextmanager
    def _on_chunk(self, optimizer: torch.optim.Optimizer, chunk: Chunk) -> Iterator[None]:
        """As `_on_parts` for some of the parameters, whose state is on their device meanwhile."""
        with (
            with_parameters(optimizer, chunk),
            self._on_parts(optimizer),
            host_state.on_device(self._local, parameters_of(optimizer)),  # of the local tensors that it has by then
        ):
            yield

    @contextmanager
    def _on_parts(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer has this rank's local tensors, with their gradients and state."""
        parts = [self._with_gradients(group["params"]) for group in optimizer.param_groups]
        self._take_state(optimizer)
        try:
            vars(optimizer)["state"], self._is_ahead = self._local, True
            with with_parameters(optimizer, parts), with_scale_beside(optimizer, parts):
                yield
        finally:
            del vars(optimizer)["state"]
            for part in self._parts.values():
                part.tensor.grad = None  # else the gradient's memory would stay allocated

    def _with_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's local tensors of the parameters, with their gradients; plain parameters are returned unchanged.

        It runs per tensor and step, and the kernels take only microseconds each: hence a single loop.
        """
        known, found = self._parts, []
        for parameter in parameters:
            part = known.get(id(parameter))
            if part is None or part.tensor is not part.parameter._local_tensor:
                if not is_dtensor(parameter):
                    make_gradient_plain(parameter)
                    lay_out_gradient(parameter)
                    found.append(parameter)
                    continue
                part = known[id(parameter)] = _Part(parameter)
            tensor = part.tensor
            gradient: Any = parameter.grad
            if gradient is not None:
                if getattr(gradient, "_spec", None) is not part.gradient_spec:
                    gradient = like_parameter(gradient, parameter)
                    part.gradient_spec = gradient._spec
                local = gradient._local_tensor
                if local.stride() != tensor.stride():
                    local = laid_out_as(tensor, local)
                tensor.grad = local
            found.append(tensor)
        return found

    # ---- state, by local tensor and by parameter ----

    def state(self) -> Any:
        """`optimizer.state` between steps: by parameter, and sharded."""
        if self._is_ahead:
            self._show()
        self._is_seen = True
        return self._shown

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes over the sharded state if it was created, loaded or accessed since the last step."""
        if "state" in vars(optimizer):  # a state was loaded
            self._shown, self._is_seen = vars(optimizer).pop("state"), True
        if not self._is_seen:
            return
        tensors = {id(part.parameter): part.tensor for part in self._parts.values()}
        self._local = defaultdict(dict)
        known, self._pairs = self._pairs, {}
        for key, row in self._shown.items():
            tensor = tensors.get(id(key))
            if is_row(row):
                row = {name: self._part_of_state(value, name, key, tensor, known) for name, value in row.items()}
            self._local[key if tensor is None else tensor] = row
        self._is_ahead = self._is_seen = False

    def _show(self) -> None:
        """Updates the sharded state. Tensors that a step changed in place keep their identity."""
        parts = {id(part.tensor): part for part in self._parts.values()}
        for key, row in self._local.items():
            part = parts.get(id(key))
            if part is None:
                self._shown[key] = row
                continue
            of_parameter = self._shown[part.parameter]
            for name in [name for name in of_parameter if name not in row]:
                del of_parameter[name]
            of_parameter.update({name: self._sharded_form(value, part) for name, value in row.items()})
        self._is_ahead = False

    def _forget_replaced(self) -> None:
        """Frees the memory of tensors in whose place the step has put others: on the device, if the script has made
        the state there."""
        self._show()
        present = {id(value) for row in self._local.values() if is_row(row) for value in row.values()}
        self._pairs = {key: pair for key, pair in self._pairs.items() if id(pair[0]) in present}

    def _part_of_state(
        self, value: Any, name: str, parameter: Any, tensor: torch.Tensor | None, known: Mapping[int, _Pair]
    ) -> Any:
        if not is_dtensor(value):
            return value if tensor is None else part_of_whole(value, name, parameter, tensor)
        local = local_part(value)
        before, _ = known.get(id(value)) or (local, value)
        is_same = memory_of(before) == memory_of(local)  # not after `value.data = ...`
        return self._remember(before if is_same else local, value)[0]

    def _sharded_form(self, value: Any, part: _Part) -> Any:
        if not has_shape_of(value, part.tensor):
            return value
        pair = self._pairs.get(id(value)) or self._remember(value, sharded_like(value, part.parameter))
        return pair[1]

    def _remember(self, local: torch.Tensor, sharded: torch.Tensor) -> _Pair:
        pair = self._pairs[id(local)] = self._pairs[id(sharded)] = (local, sharded)
        return pair


class _Part:
    """A sharded parameter and its local tensor, which the optimizer gets in its place; it has a `.grad` during a step.

    `gradient_spec`: the DTensor spec of the last gradient, checked to match the parameter's placements.
    """

    __slots__ = ("gradient_spec", "parameter", "tensor")

    def __init__(self, parameter: DTensor) -> None:
        self.parameter, self.tensor = parameter, parameter._local_tensor
        self.gradient_spec: Any = ()  # of none yet: a plain gradient has None


class _ShownState:
    """Descriptor for `optimizer.state`. During a step the optimizer has an instance attribute of this name."""

    def __get__(self, optimizer: torch.optim.Optimizer | None, kind: Any = None) -> Any:
        return self if optimizer is None else vars(optimizer)["_shardkit_step"].state()


def _let_state_be_seen(optimizer: torch.optim.Optimizer, step: LocalStep) -> None:
    """Routes `optimizer.state` to the step, by giving the optimizer a subclass with that property."""
    vars(optimizer)["_shardkit_step"] = step
    optimizer.__class__ = _with_shown_state(kind_of(optimizer))  # type: ignore[arg-type]


@cache
def _with_shown_state(kind: Any) -> Any:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        return copyreg.__newobj__, (kind,), self.__getstate__()  # type: ignore[attr-defined]

    names = {"state": _ShownState(), "__reduce_ex__": reduce_ex, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**names, "_shardkit_original": kind})
