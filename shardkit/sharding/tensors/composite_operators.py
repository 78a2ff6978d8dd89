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
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators

_aten = torch.ops.aten
_OF_ONE = operators("ravel quantile nanquantile flatten.using_ints quantile.scalar nanquantile.scalar")
_OF_TWO = operators(
    "broadcast_tensors l1_loss kl_div outer kron fake_quantize_per_channel_affine cosine_similarity pairwise_distance "
    "max.other min.other subtract.Tensor multiply.Tensor divide.Tensor true_divide.Tensor clip.Tensor less.Tensor "
    "greater.Tensor not_equal.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor __iand__.Tensor __ior__.Tensor "
    "__ixor__.Tensor"
)
"""One of the two may be plain."""
_VIEWS = operators("t transpose.int permute unsqueeze")
"""See `handle`."""


@cache
def install() -> None:
    """Takes them apart. Has an effect once per process."""
    handle((*_OF_ONE, *_OF_TWO), lambda operator, args, kwargs: operator.decompose(*args, **kwargs))
    handle([_aten.result_type.Tensor], lambda _, args, __: torch.result_type(*map(local_part, args)))
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


def _is_taken_apart(operator: Any) -> bool:
    """Whether DTensor's dispatcher takes the operator apart if it has no layout for it."""
    return torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(
        operator.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
