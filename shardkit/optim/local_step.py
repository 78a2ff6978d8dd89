"""The step of an optimizer whose parameters are sharded, with torch's own kernels on plain tensors.

    stepper_of(optimizer).step()

Elementwise optimizers (Adam, SGD, ...) work on this rank's parts: nothing is communicated, and the cost is that of the
kernels. (On the sharded tensors themselves every operator is first worked out for the whole list of them, which takes
time by the square of their number.) Adafactor and Muon look at whole rows and matrices: parameters and gradients are
gathered, some at a time, and every rank computes the same. Any other optimizer runs on sharded tensors as it is.

Outside of the step the optimizer's groups hold the model's parameters, and its state is sharded as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, local_rows, sharded_like
from shardkit.errors import UsageError

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
FUSED = (torch.optim.Adam, torch.optim.AdamW)
# What each update needs of one tensor is in that tensor alone, but in all of it.
WHOLE_TENSORS = ("torch.optim.Adafactor", "torch.optim.Muon", "transformers.optimization.Adafactor")
# How much of whole parameters and gradients is there at a time.
WHOLE_BYTES = 256 << 20


class Stepper(Protocol):
    """One optimizer's way of stepping."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; what the closure returned. Collective where whole tensors are needed."""


def stepper_of(optimizer: torch.optim.Optimizer) -> Stepper:
    """How this optimizer steps on the parameters that it has now. UsageError where it cannot."""
    is_sharded = any(isinstance(p, DTensor) for p in _parameters(optimizer))
    _refuse(optimizer, is_sharded)
    choose_kernels(optimizer)
    if is_sharded and type(optimizer) in ELEMENTWISE:
        return LocalStep(optimizer)
    if is_sharded and needs_whole_tensors(optimizer):
        return WholeStep(optimizer)
    return PlainStep(optimizer)


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's state describes whole parameters, on every rank alike."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}" in WHOLE_TENSORS


def _refuse(optimizer: torch.optim.Optimizer, is_sharded: bool) -> None:
    if is_sharded and isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "prepare: LBFGS treats all parameters as one vector, which no rank holds (got sharded parameters); use "
            "strategy NO_SHARD, or another optimizer."
        )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class PlainStep:
    """The optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)


class LocalStep:
    """The optimizer's own step on this rank's parts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._known: dict[int, dict[str, tuple[Any, Any]]] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = _run(closure)
        with self._on_parts():
            self._optimizer.step()
        return result

    @contextmanager
    def _on_parts(self) -> Iterator[None]:
        groups, state = self._optimizer.param_groups, self._optimizer.state
        found = [group["params"] for group in groups]
        parts: dict[torch.Tensor, torch.Tensor] = {}
        local: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for group in groups:
            group["params"] = [parts.setdefault(p, self._part(p)) for p in group["params"]]
        for parameter, part in parts.items():
            if parameter in state:
                local[part] = self._local_state(parameter, state[parameter])
        self._optimizer.state = local
        try:
            yield
        finally:
            self._optimizer.state = state
            for group, parameters in zip(groups, found, strict=True):
                group["params"] = parameters
            for parameter, part in parts.items():
                if part in local:
                    self._keep(parameter, part, local[part], state)
                if part is not parameter:
                    part.grad = None

    def _part(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter, with its gradient; a plain parameter itself."""
        if not isinstance(parameter, DTensor):
            return parameter
        local = local_part(parameter)
        known = self._parts.get(id(parameter))
        if known is None or known[0] is not local:
            known = self._parts[id(parameter)] = (local, local.detach())
        known[1].grad = _local_gradient(parameter)
        return known[1]

    def _local_state(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The parts of a parameter's state; the same objects each time, where the state is that of the last step."""
        known = self._known.get(id(parameter), {})
        return {
            key: known[key][1] if key in known and known[key][0] is value else _part_of_state(value)
            for key, value in state.items()
        }

    def _keep(self, parameter: torch.Tensor, part: torch.Tensor, local: dict[str, Any], state: Any) -> None:
        """The parameter's state after the step, sharded as it is; what was there before stays the same object."""
        known, own = self._known.setdefault(id(parameter), {}), state[parameter]
        for key in [key for key in own if key not in local]:
            del own[key]
            known.pop(key, None)
        for key, value in local.items():
            if key not in known or known[key][1] is not value or own.get(key) is not known[key][0]:
                kept = own.get(key)
                if kept is None or _part_of_state(kept) is not value:
                    kept = _as_sharded(value, part, parameter)
                known[key] = kept, value
                own[key] = kept


def _part_of_state(value: Any) -> Any:
    return local_part(value) if isinstance(value, DTensor) else value


def _as_sharded(value: Any, part: torch.Tensor, parameter: torch.Tensor) -> Any:
    if not (isinstance(parameter, DTensor) and isinstance(value, torch.Tensor) and value.dim()):
        return value
    return sharded_like(value, parameter) if value.shape == part.shape else value


def _local_gradient(parameter: DTensor) -> torch.Tensor | None:
    gradient = parameter.grad
    if gradient is None:
        return None
    if not isinstance(gradient, DTensor):
        raise UsageError(
            f"optimizer step: the gradient of a sharded parameter of shape {tuple(parameter.shape)} is a plain tensor "
            f"(got shape {tuple(gradient.shape)}); set gradients that are sharded as the parameter is."
        )
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


class WholeStep:
    """The optimizer's own step on whole parameters and gradients, some at a time, the same on every rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        result = _run(closure)
        groups, state = self._optimizer.param_groups, self._optimizer.state
        found = [group["params"] for group in groups]
        try:
            for chunk in _chunks(found):
                self._step_on([[p for p in parameters if id(p) in chunk] for parameters in found], state)
        finally:
            self._optimizer.state = state
            for group, parameters in zip(groups, found, strict=True):
                group["params"] = parameters
        return result

    def _step_on(self, parameters: list[list[torch.Tensor]], state: Any) -> None:
        whole = {p: _whole(p) for of_group in parameters for p in of_group}
        own: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        own.update({whole[p]: state[p] for p in whole if p in state})
        for group, of_group in zip(self._optimizer.param_groups, parameters, strict=True):
            group["params"] = [whole[p] for p in of_group]
        self._optimizer.state = own
        self._optimizer.step()
        with torch.no_grad():
            for parameter, value in whole.items():
                if isinstance(parameter, DTensor):
                    local = local_part(parameter)
                    local.copy_(value[local_rows(parameter)].reshape(local.shape))
                if value in own:
                    state[parameter] = own[value]


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter with its gradient, whole; a plain one as it is. Collective where it is sharded."""
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        value = parameter.full_tensor().detach()
        value.grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    return value


def _chunks(groups: Sequence[Sequence[torch.Tensor]]) -> Iterator[set[int]]:
    """Ids of parameters that have a gradient, up to WHOLE_BYTES together."""
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


def _run(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def choose_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer update many parameters at once where torch can, with equal results. In place, repeatable.

    torch takes that path by itself for plain parameters on a GPU only. A choice that the user made (`foreach=`,
    `fused=`) is kept. Loading a state chooses anew, since a saved state brings the choice of the run that saved it.
    """
    _choose(optimizer)
    if not getattr(optimizer, "_shardkit_chooses", False):
        optimizer.register_load_state_dict_post_hook(_choose_again)
        optimizer._shardkit_chooses = True  # type: ignore[attr-defined]


def _choose_again(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for option in ("fused", "foreach"):
            if option in group and optimizer.defaults.get(option) is None:
                group[option] = None
    _choose(optimizer)


def _choose(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("fused") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            continue
        if type(optimizer) in FUSED and all(map(_can_fuse, group["params"])):
            group["fused"] = True
            _move_step_counts(optimizer, group["params"])
        elif type(optimizer) in ELEMENTWISE:
            group["foreach"] = True


def _can_fuse(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and local_part(parameter).device.type in ("cpu", "cuda")


def _move_step_counts(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """The fused update wants the step count as an fp32 tensor beside its parameter."""
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")
        if step is not None:
            device = local_part(parameter).device
            optimizer.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32).to(device)
