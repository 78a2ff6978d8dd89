"""The fused kernels of torch's SGD and Adagrad on sharded tensors, for an optimizer that is not prepared.

DTensor has no layout for them (checked on torch 2.11 to 2.15). They work element by element, so each rank's part is
enough.
"""

from functools import cache
from typing import Any

from shardkit.distributed.tensors import is_dtensor, local_part
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators
from shardkit.sharding.tensors.settled import redistributed


@cache
def install() -> None:
    """Makes them work on each rank's part. Has an effect once per process."""
    handle(operators("_fused_sgd_ _fused_adagrad_"), _on_parts)


def _on_parts(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Collective where a gradient is sharded otherwise than its parameter."""
    parameters, gradients, *states = args
    are_sharded = all(map(is_dtensor, (*parameters, *gradients)))  # the kernels check no sizes
    if not are_sharded or not all(map(_is_of_part, parameters, *states)):
        return as_torch_does(operator, args, kwargs)
    of_parts = [
        gradient if gradient.placements == parameter.placements else redistributed(gradient, parameter.placements)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return operator(*([local_part(one) for one in of_kind] for of_kind in (parameters, of_parts, *states)), **kwargs)


def _is_of_part(parameter: Any, *states: Any) -> bool:
    """Whether the states are sharded as the parameter is; counts of steps are plain numbers."""
    return all(one.placements == parameter.placements if is_dtensor(one) else not one.dim() for one in states)
