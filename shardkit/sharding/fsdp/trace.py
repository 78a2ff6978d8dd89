"""A trace of the gathers and reductions of a sharded model's units, to detect ranks that used different units."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass
class Trace:
    """A hash of what a model's units have done; equal on ranks that used the same modules in the same order."""

    value: int = 0

    def add(self, *event: int) -> None:
        self.value = hash((self.value, *event))


def set_trace(model: nn.Module, trace: Trace) -> None:
    """Set the model's trace."""
    vars(model)["_shardkit_trace"] = trace


def trace_of(model: nn.Module) -> Trace | None:
    """The model's trace; None if it has none."""
    return vars(model).get("_shardkit_trace")
