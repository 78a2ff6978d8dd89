"""The original parameters of a sharded model, to which a script may still refer (a list taken before `prepare`). They
have no values any more, and raise an error when they are used."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shardkit.distributed.tensors import is_composed, is_dtensor
from shardkit.errors import UsageError


class ReleasedParameter(nn.Parameter):
    """An original parameter of a model that was sharded. It has no values, gradient or shape any more.

    Its fqn is in `shardkit_name`. Any computation with it raises UsageError, since it would use an empty tensor. So
    does its `grad`, which stays None: a loop over gradients would skip it without a word.
    """

    shardkit_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name_of(func)
        reads_attribute = getattr(func, "__name__", "") == "__get__" and name not in _LOST
        if func in _READ_ONLY or reads_attribute:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        fqn = next((one.shardkit_name for one in _flat(args) if isinstance(one, cls)), "a parameter")
        raise UsageError(
            f"{fqn}: this parameter was taken from the model before prepare, which has replaced it by a sharded one "
            f"(got a use of {name}); take it from the prepared model: model.parameters(). An optimizer that was built "
            "before is given to prepare; modules in a plain list belong into an nn.ModuleList."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.data, memo)  # raises

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)  # raises


# Functions that only read metadata. (Attributes are read by functions named __get__.)
_READ_ONLY: set[Any] = {torch.Tensor.__hash__, torch.Tensor.__repr__}
_READ_ONLY |= {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.untyped_storage}

# Attributes that describe the values.
_LOST = {"data", "grad", "shape", "ndim", "nbytes", "T", "mT", "H", "mH", "real", "imag"}


def _name_of(func: Any) -> str:
    """The name of a function of tensors; for a read or an assignment of an attribute, that of the attribute."""
    is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    return str(getattr(func.__self__ if is_attribute else func, "__name__", func))


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def release(parameters: Mapping[str, nn.Parameter]) -> None:
    """Free the memory of the original parameters, to which an optimizer built before prepare may still refer."""
    for fqn, parameter in parameters.items():
        if is_dtensor(parameter) or is_composed(parameter):  # its own class has no tensor without values
            continue
        if not parameter.is_meta:
            parameter.data = parameter.data.new_empty(0)
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReleasedParameter
            vars(parameter)["shardkit_name"] = fqn
