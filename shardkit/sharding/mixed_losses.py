"""Losses that mix what a forward computed with sharded parameters themselves, such as a penalty on weights.

`loss + 0.1 * weight.pow(2).sum()` is a DTensor where the weight is sharded. Its backward would hand DTensors to the
plain part of the graph, which cannot go on with them.
"""

from typing import Any

import torch

from shardkit.distributed.tensors import is_dtensor

# The nodes by which a DTensor becomes a plain tensor.
_TO_PLAIN = {"_ToTorchTensorBackward"}


def keep_plain(loss: torch.Tensor) -> None:
    """Let gradients become plain tensors where the graph of a sharded loss comes to plain tensors. Not collective."""
    if not is_dtensor(loss) or loss.grad_fn is None:
        return
    sharded = _sharded_nodes(loss.grad_fn)
    for node in sharded:
        for following, _ in node.next_functions:
            if following is not None and following not in sharded and following.name() != _ACCUMULATES:
                following.register_prehook(_whole)


_ACCUMULATES = "torch::autograd::AccumulateGrad"


def _sharded_nodes(root: Any) -> set[Any]:
    """Nodes whose result in forward was a DTensor: what was computed of one is one, until it is made plain."""
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
    """A sharded gradient of a plain tensor as every rank has it: it is the same on all, so nothing is sent."""
    return tuple(gradient.full_tensor() if is_dtensor(gradient) else gradient for gradient in gradients)
