"""Operators on sharded tensors that do something else than torch's. Each module that has some says why."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import outside_inference_mode

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the operator, its positional and its named arguments, in place of the operator."""


_torchs: dict[Any, Handler] = {}
"""Those of torch itself, where ours stand in their place."""
_ours: set[Any] = set()


def operators(names: str) -> tuple[Any, ...]:
    """The operators of ATen with these names, `mm add.Tensor`; of one without an overload the default."""
    parts = (name.partition(".") for name in names.split())
    return tuple(getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in parts)


def handle(handled: Iterable[Any], handler: Handler) -> None:
    """Calls the handler for these operators on sharded tensors, from now on and in the whole process. Has no effect on
    a torch without handlers. An operator has one handler; that of a view runs outside of inference mode, in which torch
    cannot make one of a tensor from before."""
    handlers = getattr(DTensor._op_dispatcher, "_custom_op_handlers", None)
    if handlers is not None:
        for operator in handled:
            assert operator not in _ours, operator
            _ours.add(operator)
            if operator in handlers:
                _torchs[operator] = handlers[operator]
            handlers[operator] = _outside_inference_mode(handler) if _is_view(operator) else handler


def _is_view(operator: Any) -> bool:
    returned = [one.alias_info for one in operator._schema.returns if one.alias_info is not None]
    return bool(returned) and not any(one.is_write for one in returned)


def _outside_inference_mode(handler: Handler) -> Handler:
    def handle_view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with outside_inference_mode():
            return handler(operator, args, kwargs)

    return handle_view


def as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on sharded tensors without the handler that was installed for it."""
    if operator in _torchs:
        return _torchs[operator](operator, args, kwargs)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)  # None where another thread is doing the same
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler
