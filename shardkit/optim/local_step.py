"""Steps of optimizers with sharded parameters, with torch's own kernels on plain tensors.

    stepper_of(optimizer, operations).step()

Elementwise optimizers (Adam, SGD, ...) work on this rank's local tensors, without communication, at the cost of the
kernels alone. (On DTensors, sharding propagation of foreach operators takes time quadratic in the number of tensors.)
Adafactor and Muon need whole rows and matrices: parameters, gradients and state are gathered, a chunk at a time, and
every rank computes the same. Any other optimizer runs unchanged, on DTensors (`plain_step.py`).

Outside of the step the param groups hold the model's parameters, and the state is sharded as they are.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from shardkit.distributed.tensors import is_dtensor, local_part, memory_of, own_part, sharded_like, whole
from shardkit.errors import UsageError
from shardkit.optim.kernels import ELEMENTWISE, choose_kernels, kind_of, laid_out_as, lay_out_gradient, parameters_of
from shardkit.optim.parts import like_parameter, make_gradient_plain, part_of_whole, sharded_part
from shardkit.optim.plain_step import Operations, PlainStep, ShardedStep

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Each update needs one whole tensor, and no other.
WHOLE_TENSORS = ("torch.optim.Adafactor", "torch.optim.Muon", "transformers.optimization.Adafactor")
# They exchange parameters between ranks: of different shards they would make a mix.
OF_REPLICAS = (
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer",
)
# Gathered parameters and gradients held at a time; the state of the same parameters comes on top.
WHOLE_BYTES = 256 << 20

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""This rank's part of a tensor of the state, and its sharded form."""


class Stepper(Protocol):
    """How one optimizer steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's result. Collective where whole tensors are needed."""


def stepper_of(optimizer: torch.optim.Optimizer, operations: Callable[[], Operations] | None = None) -> Stepper:
    """The stepper for this optimizer and its current parameters; `operations`: what fills the gaps of DTensor where it
    steps on these. UsageError where it cannot step on its parameters."""
    is_sharded = any(is_dtensor(p) for p in parameters_of(optimizer))
    refuse_unfit(optimizer)
    choose_kernels(optimizer)
    if is_sharded and kind_of(optimizer) in ELEMENTWISE:
        return LocalStep(optimizer)
    if is_sharded and needs_whole_tensors(optimizer):
        return WholeStep(optimizer)
    if is_sharded and operations is not None:
        return ShardedStep(optimizer, operations)
    return PlainStep(optimizer)


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step needs whole parameters, of which its state may have rows and columns."""
    kind = kind_of(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" in WHOLE_TENSORS


def refuse_unfit(optimizer: torch.optim.Optimizer) -> None:
    """UsageError where the optimizer cannot step on sharded parameters in any way."""
    has_parts = any(is_dtensor(p) and p.device_mesh.size() > 1 for p in parameters_of(optimizer))
    if has_parts and isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "prepare: LBFGS treats all parameters as one vector, which no rank holds (got sharded parameters); use "
            "strategy NO_SHARD, or another optimizer."
        )
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in kind_of(optimizer).__mro__}
    if has_parts and kinds & set(OF_REPLICAS):
        raise UsageError(
            f"prepare: {kind_of(optimizer).__name__} exchanges parameters between ranks as if each held all of them "
            "whole (got sharded parameters); give its inner optimizer, whose state is sharded as the parameters are, "
            "or use strategy NO_SHARD."
        )


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
        return _step_between_hooks(optimizer, partial(self._on_parts, optimizer), closure)

    @contextmanager
    def _on_parts(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer has this rank's local tensors, with their gradients and state."""
        groups = optimizer.param_groups
        found = [group["params"] for group in groups]
        parts = [self._with_gradients(parameters) for parameters in found]
        self._take_state(optimizer)
        try:
            vars(optimizer)["state"], self._is_ahead = self._local, True
            for group, of_group in zip(groups, parts, strict=True):
                group["params"] = of_group
            yield
        finally:
            del vars(optimizer)["state"]
            for group, parameters in zip(groups, found, strict=True):
                group["params"] = parameters
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
            if _is_row(row):
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
        if not _has_shape_of(value, part.tensor):
            return value
        pair = self._pairs.get(id(value)) or self._remember(value, sharded_like(value, part.parameter))
        return pair[1]

    def _remember(self, local: torch.Tensor, sharded: torch.Tensor) -> _Pair:
        pair = self._pairs[id(local)] = self._pairs[id(sharded)] = (local, sharded)
        return pair


def _is_row(row: Any) -> bool:
    """Whether this is a parameter's state, and not another value that the optimizer keeps in its state."""
    return isinstance(row, dict)


def _has_shape_of(value: Any, tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of this shape, and no number."""
    return isinstance(value, torch.Tensor) and bool(value.dim()) and value.shape == tensor.shape


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


class WholeStep:
    """The optimizer's own step on whole parameters and gradients, a chunk at a time, the same on every rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = _run(closure)
        chunks = list(_chunks([group["params"] for group in self._optimizer.param_groups]))
        for number, chunk in enumerate(chunks, 1):
            _step_between_hooks(
                self._optimizer, partial(self._on_whole, chunk), is_first=number == 1, is_last=number == len(chunks)
            )
        return result

    @contextmanager
    def _on_whole(self, chunk: set[int]) -> Iterator[None]:
        """Inside, the optimizer has the chunk's parameters as full tensors, whose values are then written back."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        found = [group["params"] for group in groups]
        parameters = [[p for p in of_group if id(p) in chunk] for of_group in found]
        whole = {p: _whole(p) for of_group in parameters for p in of_group}
        own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        own.update({whole[p]: _whole_row(state[p], whole[p].device) for p in whole if p in state})
        try:
            for group, of_group in zip(groups, parameters, strict=True):
                group["params"] = [whole[p] for p in of_group]
            self._optimizer.state = own
            yield
        finally:
            self._optimizer.state = state
            for group, of_group in zip(groups, found, strict=True):
                group["params"] = of_group
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
    if not _is_row(row):
        return row
    full = {name: whole(value) if is_dtensor(value) else value for name, value in row.items()}
    has_dims = {name for name, value in full.items() if isinstance(value, torch.Tensor) and value.dim()}
    return {name: value.to(device) if name in has_dims else value for name, value in full.items()}


def _kept_row(row: Any, before: Any, parameter: torch.Tensor) -> Any:
    """A parameter's state as it is kept between steps: what has the parameter's shape is sharded as the parameter is,
    in the tensors of `before`, if there are such. Rows and columns are kept whole."""
    if not (_is_row(row) and is_dtensor(parameter)):
        return row
    earlier = before if _is_row(before) else {}
    return {
        name: _kept(value, earlier.get(name), parameter) if _has_shape_of(value, parameter) else value
        for name, value in row.items()
    }


def _kept(value: torch.Tensor, before: Any, parameter: DTensor) -> Any:
    if not (is_dtensor(before) and before.placements == parameter.placements):
        return sharded_part(value, parameter)
    local_part(before).copy_(own_part(value, parameter))
    return before


def _chunks(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[set[int]]:
    """Chunks of ids of parameters that have a gradient, about WHOLE_BYTES each."""
    chunk: set[int] = set()
    size = 0
    for parameter in (p for parameters in groups for p in parameters if p.grad is not None):
        if chunk and size >= WHOLE_BYTES:
            yield chunk
            chunk, size = set(), 0
        chunk.add(id(parameter))
        size += 2 * parameter.numel() * parameter.element_size()
    if chunk:
        yield chunk


def _step_between_hooks(
    optimizer: torch.optim.Optimizer,
    inside: Callable[[], AbstractContextManager[None]],
    closure: Callable[[], Any] | None = None,
    is_first: bool = True,
    is_last: bool = True,
) -> Any:
    """The optimizer's own step in the context `inside`; returns the closure's result.

    Hooks on the step run outside of the context, so that they see the model's parameters. Of several steps that make
    one, the first runs the hooks before it, and the last those after it.
    """
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    result = None
    with ExitStack() as stack:

        def enter(*_: Any) -> None:
            nonlocal result
            result = _run(closure)
            stack.enter_context(inside())

        def leave(*_: Any) -> None:
            stack.close()

        try:
            optimizer._optimizer_step_pre_hooks = OrderedDict({**(before if is_first else {}), -1: enter})
            optimizer._optimizer_step_post_hooks = OrderedDict({-1: leave, **(after if is_last else {})})
            optimizer.step()
        finally:
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = before, after
    return result


def _run(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
