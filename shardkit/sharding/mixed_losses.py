"""Losses that combine the output of a forward with sharded parameters, such as a weight penalty.

`loss + 0.1 * weight.pow(2).sum()` is a DTensor if the weight is sharded. Its backward would pass DTensors to the part
of the graph with plain tensors, which does not support them. Sums are supported; see `keep_plain` for what is not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError

# The autograd nodes that make a plain tensor of a DTensor, and the other way round: torch's to_local, a
# parameter's full_tensor, and what torch.autograd.grad returns for a sharded parameter.
_TO_PLAIN = {"_ToTorchTensor", "_WholeParameter"}
_TO_SHARDED = {"_MeanOfGradients"}


def keep_plain(loss: torch.Tensor) -> None:
    """Convert gradients of a sharded loss to plain tensors where its graph reaches plain tensors. Not collective.

    Raises UsageError if the gradient of a sharded parameter depends on a plain tensor (`loss * weight.sum()`): each
    rank would compute that of its shard, with the values of its own samples only.
    """
    if not is_dtensor(loss) or loss.grad_fn is None:
        return
    sharded = _sharded_nodes(loss.grad_fn)
    for node in sharded:
        _keep_placements(node)
    of_sharded = [node for node in sharded if _kind(node) not in _TO_SHARDED]
    meeting = {node: plain for node in of_sharded if (plain := _plain_ones(node, sharded))}
    of_plain = [_plain_ones(node, sharded) for node in _scaled_nodes(loss.grad_fn, sharded)]
    for following in {*chain.from_iterable((*meeting.values(), *of_plain))}:
        following.register_prehook(_whole)
    for node in {following for one in sharded for following in _following(one)} - sharded:
        if node.name() == _ACCUMULATES and not node.metadata.get(_whole):
            node.register_prehook(_whole)
            node.metadata[_whole] = True  # a leaf's node may outlive this graph
    if loss.device_mesh.size() > 1:
        of_samples = [node for node, plain in meeting.items() if not all(map(_is_of_parameter, plain))]
        _refuse_products(_with_users(of_samples, sharded))


def _refuse_products(nodes: Iterable[Any]) -> None:
    """UsageError where one of these nodes is more than a sum, or a scale by a number."""
    for node in nodes:
        kind = _kind(node)
        if kind not in _SUMS | _VIEWS and not (kind in _SCALES and len(_following(node)) == 1):
            raise UsageError(
                f"backward: the loss combines sharded parameters with values of this rank's samples by other than a "
                f"sum (got {node.name()}), so their gradients would lack the samples of the other ranks; compute it in "
                "the forward of a module of the model that has these parameters, and call this module: "
                "model.weigh(losses)."
            )


def _keep_placements(node: Any) -> None:
    """Where the node accumulates the gradient of a sharded parameter: it gets the parameter's placements. (Those of
    `weight.sum()` or of a row are whole, and FSDP adds this rank's part of the other gradients to the local tensor.)"""
    parameter = getattr(node, "variable", None)
    if not is_dtensor(parameter) or node.metadata.get(_keep_placements):
        return
    from shardkit.sharding.tensors.settled import redistributed  # imports DTensor

    placements = parameter.placements

    def redistribute(*_: Any) -> None:
        if is_dtensor(parameter.grad) and parameter.grad.placements != placements:
            parameter.grad = redistributed(parameter.grad, placements)

    node.register_hook(redistribute)  # after it, since torch 2.11 accumulates a copy, which is whole for uneven parts
    node.metadata[_keep_placements] = True  # a parameter's node may outlive this graph


_ACCUMULATES = "torch::autograd::AccumulateGrad"

# Operations whose gradient does not depend on their operands; the scales have this property if only one operand has a
# gradient.
_SUMS = {"Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "Stack", "Cat"}
_VIEWS = {"Alias", "View", "Clone", "ToCopy", "Unsqueeze", "Squeeze", "Expand", "Select", "ReshapeAlias"}
_VIEWS |= {"UnsafeView", "Permute", "Transpose", "T"}
_SCALES = {"Mul", "Div"}


def _kind(node: Any) -> str:
    return node.name().rstrip("0123456789").removesuffix("Backward")


def _plain_ones(node: Any, sharded: set[Any]) -> list[Any]:
    """The nodes of plain tensors that this node takes."""
    return [one for one in _following(node) if one not in sharded and one.name() != _ACCUMULATES]


def _is_of_parameter(node: Any) -> bool:
    """Whether it is a view of a plain parameter, such as a scalar that is flattened: no samples take part in it."""
    while node.name() != _ACCUMULATES:
        if _kind(node) not in _VIEWS or node.next_functions[0][0] is None:
            return False
        node = node.next_functions[0][0]
    return True


def _scaled_nodes(root: Any, sharded: set[Any]) -> set[Any]:
    """The sums and scales of plain values next to the loss. They may have a number of sharded tensors in them, such as
    an adaptive weight of a loss, `weights.norm().detach() * loss`, which makes their gradients sharded."""
    return _reached([root], _following, lambda node: _kind(node) in _SUMS | _VIEWS | _SCALES) - sharded


def _with_users(nodes: Iterable[Any], among: set[Any]) -> set[Any]:
    """These nodes, and those of `among` that use their results, directly or not."""
    users: dict[Any, list[Any]] = defaultdict(list)
    for node in among:
        for following in _following(node):
            users[following].append(node)
    return _reached(nodes, users.__getitem__, among.__contains__)


def _sharded_nodes(root: Any) -> set[Any]:
    """Nodes whose output in forward was a DTensor: those computed from DTensors, up to conversions to plain tensors."""
    known = _reached([root], _following, lambda _: True)
    holders = [node for node in known if is_dtensor(getattr(node, "variable", None)) or _kind(node) in _TO_SHARDED]
    return _with_users(holders, {node for node in known if _kind(node) not in _TO_PLAIN})


def _following(node: Any) -> list[Any]:
    """The nodes whose results this one takes, as often as it takes them."""
    return [following for following, _ in node.next_functions if following is not None]


def _reached(nodes: Iterable[Any], leads_to: Callable[[Any], Iterable[Any]], counts: Callable[[Any], bool]) -> set[Any]:
    """The nodes that count among these and what they lead to, by way of such nodes alone."""
    found: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and counts(node):
            found.add(node)
            waiting += leads_to(node)
    return found


def _whole(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients as plain tensors. They are replicated, so nothing is communicated."""
    return tuple(gradient.full_tensor() if is_dtensor(gradient) else gradient for gradient in gradients)
