"""What the units of a sharded model have gathered and reduced, so that ranks which used different ones are found."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass
class Trace:
    """What a model's units have done, as one number; equal on ranks that used the same modules in the same order."""

    value: int = 0

    def add(self, *event: int) -> None:
        self.value = hash((self.value, *event))


def attach(model: nn.Module, trace: Trace) -> None:
    """From now on the trace is the model's."""
    vars(model)["_shardkit_trace"] = trace


def trace_of(model: nn.Module) -> Trace | None:
    """What the units of the model have done so far; None where it has none."""
    return vars(model).get("_shardkit_trace")
