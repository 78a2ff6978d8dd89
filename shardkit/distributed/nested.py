"""Tensors in dicts, lists and tuples, as collectives take them and models return them."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch

from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """`data` with `function` applied to each tensor in it. UsageError for other leaves."""

    def of_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            raise no_tensor(leaf)
        return function(leaf.full_tensor() if is_dtensor(leaf) else leaf)

    return map_leaves(of_leaf, data)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """`data` with `function` applied to each leaf in it (neither dict, list nor tuple)."""
    if isinstance(data, Mapping):
        items = {key: map_leaves(function, value) for key, value in data.items()}
        return items if type(data) is dict else _rebuilt(data, items)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return sequence_like(data, [map_leaves(function, value) for value in data])
    return function(data)


def sequence_like(sequence: list | tuple, items: list) -> Any:
    """The items in a sequence of the same class: a copied list, which keeps its attributes, or a tuple made of them;
    the sequence itself where its class is made in another way and nothing has moved."""
    if type(sequence) in (list, tuple):
        return type(sequence)(items)
    if isinstance(sequence, list):
        same = copy(sequence)
        same[:] = items
        return same
    if all(item is before for item, before in zip(items, sequence, strict=True)):
        return sequence
    try:
        return type(sequence)(items)
    except TypeError:
        return tuple(items)


def no_tensor(data: Any) -> UsageError:
    """The error for a leaf that is no tensor."""
    return UsageError(
        f"a collective takes tensors in dicts, lists and tuples (got {type(data).__name__}); "
        "make it a tensor, or use gather_object for other objects."
    )


def leaves(data: Any) -> list[Any]:
    """The leaves of the structure (neither dict, list nor tuple), in order."""
    if isinstance(data, Mapping):
        return [leaf for value in data.values() for leaf in leaves(value)]
    if isinstance(data, (list, tuple)):
        return [leaf for value in data for leaf in leaves(value)]
    return [data]


def _rebuilt(like: Mapping, items: dict) -> Any:
    """A mapping of the same class where it can be made from a dict (OrderedDict, a model's output), else a dict."""
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
