"""Moves batches to the device."""

from collections.abc import Collection, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch

from shardkit.distributed import xla
from shardkit.distributed.nested import sequence_like
from shardkit.signatures import signature


def to_device(value: Any, device: torch.device | None, kept: Collection[str] = ()) -> Any:
    """The same nesting of dicts, lists, tuples and objects with `.to`, every tensor on the device: on XLA
    devices each with its part of the batch. What dicts hold under the names in `kept` stays as it is."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        if device.type == "xla" and value.device.type == "cpu":
            return xla.spread_batch(value)
        return value.to(device, non_blocking=_is_pinned(value))
    if callable(getattr(value, "to", None)):
        moved = value.to(device, **_without_waiting(value))
        return value if moved is None else moved  # a batch class may move itself and return nothing
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device, kept) for item in value))
    if isinstance(value, (list, tuple)):
        return sequence_like(value, [to_device(item, device, kept) for item in value])
    if isinstance(value, Mapping):
        return _like(value, {k: item if k in kept else to_device(item, device, kept) for k, item in value.items()})
    return value


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


def _without_waiting(batch: Any) -> dict[str, bool]:
    """The arguments with which a mapping of tensors in pinned memory, such as Transformers' BatchEncoding, copies them
    asynchronously."""
    tensors = [one for one in batch.values() if isinstance(one, torch.Tensor)] if isinstance(batch, Mapping) else []
    is_asynchronous = bool(tensors) and all(map(_is_pinned, tensors)) and _takes_non_blocking(batch.to)
    return {"non_blocking": True} if is_asynchronous else {}


def _takes_non_blocking(to: Any) -> bool:
    try:
        return "non_blocking" in signature(to).parameters
    except (TypeError, ValueError):
        return False


def _like(mapping: Mapping, items: dict) -> Mapping:
    """The items in a mapping of the same class, where it can be copied and updated; else in a dict."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    same = copy(mapping)
    same.update(items)
    return same
