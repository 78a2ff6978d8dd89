"""The number of a sharded tensor without dimensions: `float(p.grad.norm())`, `.item()`, `if loss > 1`, `f"{norm:.3f}"`.

A norm or a sum of a sharded tensor is pending: each rank has that of its part (torch's placement Partial). torch's
`item()` returns this part, so that ranks log and compare different numbers, none of them the tensor's. Here it is
computed over all ranks first, as torch does in every other operation on such a tensor. Formatting it is an error
without words in torch, and so are the numbers of a tensor with dimensions (`.numpy()`, `.tolist()`), which ranks would
have to ask for together. (Checked on torch 2.11 to 2.15.)
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import whole
from shardkit.errors import UsageError
from shardkit.sharding.tensors.dtensor_operators import handle, operators


@cache
def install() -> None:
    """Makes the number of a sharded tensor that of one process. Has an effect once per process."""
    # In inference mode torch passes on `item` and `is_nonzero` themselves, not what they consist of.
    handle(operators("_local_scalar_dense item is_nonzero"), _number)
    DTensor.__format__ = _format  # type: ignore[assignment]
    for name in ("numpy", "tolist", "__array__"):
        setattr(DTensor, name, _numbers(name))


def _number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor's number. Collective over the tensor's mesh where its value is pending or sharded."""
    (tensor,) = args
    return operator(whole(tensor))


def _format(tensor: DTensor, how: str) -> str:
    """As of a plain tensor: the number's format. Collective as above."""
    return format(tensor.item(), how) if not tensor.dim() else object.__format__(tensor, how)


def _numbers(name: str) -> Callable[..., Any]:
    """The method of this name: of a number as above, of other tensors an error."""

    def numbers(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dim():
            raise UsageError(
                f"tensor.{name}: a rank has only a part of a sharded tensor (got one of shape {tuple(tensor.shape)}); "
                "take tensor.full_tensor() on all ranks, then its numbers on any of them."
            )
        return getattr(whole(tensor).detach().to(tensor.device), name)(*args, **kwargs)  # after norm.cpu(), there

    return numbers
