"""Operators that consist of others (such as the `expand_as` of `normalize`) on sharded tensors in inference mode.

Elsewhere torch takes them apart before DTensor sees them. In inference mode it does not, and DTensor finds one layout
for the whole operator and runs it on each rank's part: wrong numbers where parts differ in size, and where an argument
is a size. Here they are taken apart there, too. (Seen on torch 2.13. 2.11 does it by itself, but for `flatten` and what
flattens: it flattens each rank's part, with the zeros that fill the last one up.)
"""

from functools import cache
from typing import Any

import torch

from shardkit.distributed.tensors import local_part
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle

_aten = torch.ops.aten
_OF_ONE = (
    *(getattr(_aten, name).default for name in ("ravel", "quantile", "nanquantile")),
    *(_aten.flatten.using_ints, _aten.quantile.scalar, _aten.nanquantile.scalar),
)
_OF_TWO = (
    *(_aten.broadcast_tensors.default, _aten.l1_loss.default, _aten.kl_div.default, _aten.outer.default),
    *(_aten.kron.default, _aten.fake_quantize_per_channel_affine.default),
    *(_aten.cosine_similarity.default, _aten.pairwise_distance.default, _aten.max.other, _aten.min.other),
    *(getattr(_aten, name).Tensor for name in ("subtract", "multiply", "divide", "true_divide", "clip")),
    *(getattr(_aten, name).Tensor for name in ("less", "greater", "not_equal")),
    *(getattr(_aten, f"__{i}{name}__").Tensor for i in ("", "i") for name in ("and", "or", "xor")),
)
"""One of the two may be plain."""
_VIEWS = (_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default)
"""See `handle`."""


@cache
def install() -> None:
    """Takes them apart. Has an effect once per process."""
    handle((*_OF_ONE, *_OF_TWO), _taken_apart)
    handle([_aten.result_type.Tensor], _result_type)
    handle(_VIEWS, as_torch_does)
    handle([_aten.detach_.default], lambda _, args, __: args[0])  # torch 2.11 lacks it; there, views come to it
    try:
        from torch.distributed.tensor._decompositions import DecompShardingStrategy
    except ImportError:  # such a torch takes them apart
        return
    has_decomposition = DecompShardingStrategy.has_decomp

    def is_tried_whole(operator: Any) -> bool:
        return not _is_taken_apart(operator) and has_decomposition(operator)

    DecompShardingStrategy.has_decomp = staticmethod(is_tried_whole)  # type: ignore[assignment, method-assign]


def _result_type(_: Any, args: tuple[Any, ...], __: dict[str, Any]) -> torch.dtype:
    return torch.result_type(*map(local_part, args))


def _taken_apart(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator.decompose(*args, **kwargs)


def _is_taken_apart(operator: Any) -> bool:
    """Whether DTensor's dispatcher takes the operator apart if it has no layout for it."""
    return torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
