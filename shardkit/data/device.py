"""Batches onto the device."""

from collections.abc import Mapping
from typing import Any

import torch


def to_device(value: Any, device: torch.device | None) -> Any:
    """The same nesting of dicts, lists, tuples and objects with `.to`, every tensor on the device."""
    if device is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=value.device.type == "cpu" and value.is_pinned())
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    return value
