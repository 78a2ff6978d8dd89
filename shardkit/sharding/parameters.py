"""Parameters before and after sharding: what they carry over, and what happens to references to the old ones.

fully_shard puts a new parameter in the place of each old one. Attributes and post-accumulate-grad hooks of the old one
are carried over. The old one, to which the script may still refer (a list taken before `prepare`), has no values any
more, and says so when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, local_rows
from shardkit.errors import UsageError

_data: Any = torch.Tensor.data
_get_data = _data.__get__


class ShardedParameter(DTensor):
    """A sharded parameter whose `p.data = values` sets its values.

    torch would accept that and go on with the old ones: a DTensor's values are those of its local tensor. Made of a
    DTensor by `__class__`; what is computed from it is an ordinary DTensor.
    """

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        return _get_data(self)

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if tuple(values.shape) != tuple(self.shape):
            raise UsageError(
                f"parameter.data = ...: a sharded parameter keeps its shape (got {tuple(values.shape)}, it has "
                f"{tuple(self.shape)}); change shapes before prepare."
            )
        with torch.no_grad():
            if not isinstance(values, DTensor):
                local_part(self).copy_(values[local_rows(self)].reshape(local_part(self).shape))
            elif values.placements == self.placements and values.device_mesh == self.device_mesh:
                local_part(self).copy_(local_part(values))
            else:
                self.copy_(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return memo[id(self)]


class ReleasedParameter(nn.Parameter):
    """A parameter as it was before its model was sharded; it has no values any more.

    Its fqn is in `shardkit_name`. Any computation with it raises: its result would be that of an empty tensor.
    """

    shardkit_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_ONLY or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((one.shardkit_name for one in _flat(args) if isinstance(one, cls)), "a parameter")
        raise UsageError(
            f"{name}: this parameter was taken from the model before prepare, which has put a sharded one in its place "
            f"(got a call of {getattr(func, '__name__', func)}); take it from the prepared model: model.parameters()."
        )


# What tools call on every parameter without computing anything. (Attributes are read by functions named __get__.)
_READ_ONLY: set[Any] = {torch.Tensor.__hash__, torch.Tensor.__repr__}
_READ_ONLY |= {torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.untyped_storage}
_SET_GRAD: Any = torch.Tensor.grad
_READ_ONLY |= {_SET_GRAD.__set__}  # zero_grad(set_to_none=True)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def release(parameters: Mapping[str, nn.Parameter]) -> None:
    """Give back the memory of whole parameters, to which an optimizer built before still refers."""
    for fqn, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            continue
        if not parameter.is_meta:
            parameter.data = parameter.data.new_empty(0)
        if type(parameter) is nn.Parameter:
            parameter.__class__ = ReleasedParameter
            vars(parameter)["shardkit_name"] = fqn


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """What a library or a script has noted on a parameter, such as `_no_weight_decay`."""
    return {name: value for name, value in vars(parameter).items() if not name.startswith(("_fsdp", "shardkit"))}


def post_accumulate_hooks_of(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """Hooks that run when a gradient has been added."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether `parameter.register_hook` was called: such a hook changes gradients before they are added."""
    return bool(parameter._backward_hooks)


def carry_over(attributes: Mapping[str, Any], to: torch.Tensor) -> None:
    """Set what the old parameter had, where the new one has nothing of this name."""
    for name, value in attributes.items():
        if name not in vars(to):
            setattr(to, name, value)
