"""Under `debug`: no optimizer steps on gradients that are NaN or infinite, and the error says where such values came
from first.

In a forward with gradients the output of every module is looked at, and in backward the gradient of that output. Before
a step all ranks look at the gradients of the parameters, and raise together, with what each has noted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from shardkit.distributed.control import ControlGroup
from shardkit.distributed.modules import clean_name, is_compiled
from shardkit.distributed.nested import leaves
from shardkit.distributed.tensors import is_composed, is_transformed, local_part
from shardkit.errors import ModelError
from shardkit.log import get_logger
from shardkit.optim.kernels import parameters_of
from shardkit.optim.loss_scale import LossScale
from shardkit.runtime.steps.counters import Counters
from shardkit.sharding.fsdp.outputs import in_objects
from shardkit.sharding.hooks import is_in_backward
from shardkit.wording import counted, first_few

log = get_logger(__name__)

# So many rows of a tensor, parameters, and ranks are named.
MOST = 3

LOSS = "the loss"


class NanOrigin:
    """What one run has noted on this rank since the last step."""

    def __init__(self, counters: Counters, loss_scale: LossScale, control: ControlGroup) -> None:
        self._counters, self._loss_scale, self._control = counters, loss_scale, control
        self._models: WeakSet[nn.Module] = WeakSet()
        self._in_forward: list[_Note] = []
        """What had NaN values: outputs, or the loss."""
        self._in_backward: str | None = None
        self._infinite: str | None = None
        """The first output with infinite values, which are meant where they mask something."""
        self._newest_finite_gradient = LOSS
        """What had it, in the present backward."""
        self._is_of_earlier_step = False

    def watch(self, model: nn.Module) -> None:
        """Looks at the outputs of the model's modules from now on; inside compiled ones torch leaves the hooks out."""
        self._models.add(model)
        compiled = 0
        for name, module in model.named_modules():
            is_scripted = isinstance(module, torch.jit.ScriptModule)
            compiled += is_scripted or is_compiled(module) or module._compiled_call_impl is not None
            if is_scripted:  # takes no hooks
                continue
            for earlier in [*module._forward_hooks.values()]:  # of a run before
                if isinstance(earlier, _AfterForward):
                    earlier.remove()
            hook = _AfterForward(self, clean_name(name) or "the model")
            hook.remove = module.register_forward_hook(hook, with_kwargs=True).remove
        if compiled:
            log.info(
                "debug: NaN values inside compiled modules (%d) are noticed after them; shardkit.compile: false names "
                "the module inside.",
                compiled,
            )

    def after_forward(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Looks at the output of a module that is trained, and later at its gradient."""
        if not torch.is_grad_enabled() or is_transformed():
            return
        self._begin()
        for tensor in _floats([output, in_objects(output)]):
            what = f"output of {name} ({type(module).__name__}, {_kind(tensor)})"
            values, note = local_part(tensor), None
            if not _is_finite(values):
                if values.isnan().any():
                    text = f"the {what}: {_places(values)}; {self._before(module, inputs)}"
                    note = self._note_in_forward(text, is_used=tensor.grad_fn is None)
                elif self._infinite is None:
                    self._infinite = what
            if tensor.grad_fn is not None:  # a parameter that is returned as it is would keep a hook of each forward
                tensor.register_hook(partial(self._after_backward, f"the {what}", note))

    def note_loss(self, loss: torch.Tensor) -> None:
        """Looks at the loss of a micro-batch, before its backward. Its forward may have been before the last step, of
        another optimizer."""
        self._newest_finite_gradient = LOSS
        values = local_part(loss)
        if _is_finite(values):
            return
        if self._in_forward:
            self._in_forward[0].is_used = True
        else:
            text = f"{LOSS}: {_places(values)}, without NaN in an output before{self._after_infinite()}"
            self._note_in_forward(text, is_used=True)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """ModelError on all ranks where a gradient that the optimizer takes is not finite on any rank. A step that a
        loss scale leaves out is only told, where the forward had such values, too. Collective."""
        is_scaled = self._loss_scale.is_on or getattr(optimizer, "found_inf", None) is not None  # by the script's own
        in_forward = next((note.text for note in self._in_forward if note.is_used), None)
        origin = in_forward if is_scaled else in_forward or self._in_backward
        bad = [p for p in parameters_of(optimizer) if p.grad is not None and not _is_finite(_values(p.grad))]
        found = self._control.exchange([len(bad), self._first_names(bad), origin])
        self._is_of_earlier_step = True
        numbers, names, origins = zip(*found, strict=True)
        if not any(numbers):
            return
        step, got = self._counters.step + 1, _got(max(numbers), dict.fromkeys(chain(*names)), origins)
        if not is_scaled:
            raise ModelError(
                f"optimizer: gradients in step {step} are NaN or infinite, and it has not changed the weights "
                f"({got[0]}); mend the samples or the module, and resume from the last checkpoint.{got[1]}"
            )
        if any(origins) and self._control.rank == 0:
            log.warning(
                "optimizer: the loss scale leaves out step %d, which has NaN or infinite values without it (%s).%s",
                step,
                *got,
            )

    def _first_names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        ids = {id(p) for p in parameters}
        named = (pair for model in self._models for pair in model.named_parameters()) if ids else ()
        return [clean_name(name) for name, p in named if id(p) in ids][:MOST]

    def _after_backward(self, what: str, note: _Note | None, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # of an output that is not used
            return
        if note is not None:
            note.is_used = True
        values = _values(gradient)
        if _is_finite(values):
            self._newest_finite_gradient = what
        elif self._in_backward is None:
            self._in_backward = self._in_micro_batch(
                f"the gradient of {what}: {_places(values)}, in the backward from "
                f"{self._newest_finite_gradient}, whose gradient is finite; "
                "torch.autograd.set_detect_anomaly(True) names the operation"
            )

    def _begin(self) -> None:
        if self._is_of_earlier_step:
            self._in_forward, self._in_backward, self._infinite = [], None, None
            self._is_of_earlier_step = False
        if not is_in_backward():  # of a recomputation
            self._newest_finite_gradient = LOSS

    def _note_in_forward(self, what: str, is_used: bool) -> _Note:
        note = _Note(self._in_micro_batch(what), is_used)
        self._in_forward.append(note)
        return note

    def _in_micro_batch(self, what: str) -> str:
        micro_step = self._counters.micro_step  # 0 outside of accumulate()
        return f"micro-batch {micro_step}: {what}" if micro_step else what

    def _before(self, module: nn.Module, inputs: Any) -> str:
        """What went into a module."""
        weights = {name: local_part(p) for name, p in module.named_parameters(recurse=False) if not is_composed(p)}
        bad = [name for name, values in weights.items() if values.isnan().any()]
        if bad:
            return f"its {first_few(bad, MOST)} had NaN values before this step"
        values = [local_part(one) for one in _floats(inputs)]
        if any(one.isnan().any() for one in values):
            return "its inputs have them already, from the data or from code between modules"
        if not all(map(_is_finite, values)):
            return f"its inputs have infinite values{self._after_infinite()}"
        largest = max((one.abs().max().item() for one in values if one.numel()), default=None)
        return "its inputs are finite" + ("" if largest is None else f", up to {largest:.3g}")

    def _after_infinite(self) -> str:
        return f"; infinite ones were first in the {self._infinite}" if self._infinite else ""


@dataclass
class _Note:
    """That an output, or the loss, had NaN values."""

    text: str
    is_used: bool
    """Whether a backward came from it, or may have: a script may leave out a micro-batch whose loss is NaN."""


class _AfterForward:
    """The forward hook of one module. In copies and pickles of the module it does nothing."""

    remove: Callable[[], None]

    def __init__(self, origin: NanOrigin, name: str) -> None:
        self._origin, self._name = origin, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._origin.after_forward(self._name, module, [args, kwargs], output)

    def __reduce__(self) -> Any:
        return partial, (_nothing,)


def _nothing(*_: Any) -> None:
    return None


def _floats(data: Any) -> Iterator[torch.Tensor]:
    """The dense tensors of floats in nested data."""
    for one in leaves(data):
        if not isinstance(one, torch.Tensor) or one.is_meta or one.is_nested or is_composed(one):
            continue
        if one.is_floating_point() and one.layout is torch.strided:
            yield one


def _is_finite(values: torch.Tensor) -> bool:
    if values.dtype.itemsize == 1:  # torch sums no fp8
        values = values.float()
    total = values.detach().sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return bool(total.isfinite()) or bool(values.isfinite().all())


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else local_part(gradient)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _places(values: torch.Tensor) -> str:
    """How many values are NaN or, if none is, infinite, and in which rows; the value where it is one."""
    if values.numel() == 1:
        return str(values.item())
    has_nan = bool(values.isnan().any())
    chosen = values.isnan() if has_nan else values.isinf()
    number = f"{int(chosen.sum())} of {values.numel()} values are {'NaN' if has_nan else 'infinite'}"
    if values.ndim < 2:
        return number
    rows = chosen.flatten(1).any(1).nonzero().flatten().tolist()
    return number + (", in all rows" if len(rows) == len(values) else f", in row {first_few(rows, MOST)}")


def _got(number: int, names: Iterable[str], origins: Sequence[str | None]) -> tuple[str, str]:
    """What had values that are not finite first, on the first rank that has any; lines for the other ranks."""
    noted = [f"on rank {rank}, {origin}" for rank, origin in enumerate(origins) if origin is not None]
    if not noted:
        noted = ["in no output of a module: in an operation on the parameters, or outside of modules"]
    others = [*noted[1:MOST], *([f"on {len(noted) - MOST} more ranks"] if len(noted) > MOST else [])]
    listed = ", ".join([*names][:MOST]) + (", ..." if number > MOST else "")
    return (
        f"got such values first {noted[0]}; then in gradients of {counted(number, 'parameter')}, {listed}",
        "".join(f"\n  also {one}" for one in others),
    )
