"""Losses that combine the output of a forward with sharded parameters, such as a weight penalty.

`loss + 0.1 * weight.pow(2).sum()` is a DTensor if the weight is sharded. Its backward would pass DTensors to the part
of the graph with plain tensors, which does not support them.
"""

from typing import Any

import torch

from shardkit.distributed.tensors import is_dtensor

# The autograd nodes that convert a DTensor to a plain tensor.
_TO_PLAIN = {"_ToTorchTensorBackward"}


def keep_plain(loss: torch.Tensor) -> None:
    """Convert gradients of a sharded loss to plain tensors where its graph reaches plain tensors. Not collective."""
    if not is_dtensor(loss) or loss.grad_fn is None:
        return
    sharded = _sharded_nodes(loss.grad_fn)
    for node in sharded:
        for following, _ in node.next_functions:
            if following is not None and following not in sharded and following.name() != _ACCUMULATES:
                following.register_prehook(_whole)


_ACCUMULATES = "torch::autograd::AccumulateGrad"


def _sharded_nodes(root: Any) -> set[Any]:
    """Nodes whose output in forward was a DTensor: those computed from DTensors, up to conversions to plain tensors."""
    order: list[Any] = []
    seen: set[Any] = set()
    waiting: list[Any] = [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            order.append(node)
            waiting += [following for following, _ in node.next_functions]
    sharded: set[Any] = set()
    users: dict[Any, list[Any]] = {}
    for node in order:
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
    found = [node for node in order if is_dtensor(getattr(node, "variable", None))]
    while found:
        node = found.pop()
        if node not in sharded and node.name() not in _TO_PLAIN:
            sharded.add(node)
            found += users.get(node, [])
    return sharded


def _whole(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients as plain tensors. They are replicated, so nothing is communicated."""
    return tuple(gradient.full_tensor() if is_dtensor(gradient) else gradient for gradient in gradients)
