"""Steps of optimizers that run unchanged, on plain or sharded parameters, and the protocol of every step."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from shardkit.errors import ShardkitError, UsageError
from shardkit.optim.kernels import kind_of


class Stepper(Protocol):
    """How one optimizer steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's result. Collective where whole tensors are needed."""


class PlainStep:
    """The optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step() if closure is None else self._optimizer.step(closure)


class Operations(AbstractContextManager[Any], Protocol):
    """Inside, operations on sharded tensors are filled in where DTensor has gaps."""

    def suspended(self) -> AbstractContextManager[None]:
        """Inside, they are torch's own."""


class ShardedStep:
    """The optimizer's own step on DTensors."""

    def __init__(self, optimizer: torch.optim.Optimizer, operations: Callable[[], Operations]) -> None:
        self._optimizer = optimizer
        self._operations = operations

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; UsageError where the optimizer does not work on sharded parameters."""
        operations = self._operations()
        failures: list[BaseException] = []

        def run_closure() -> Any:
            assert closure is not None
            with operations.suspended():
                try:
                    return closure()
                except BaseException as error:
                    failures.append(error)
                    raise

        try:
            with operations:
                return self._optimizer.step() if closure is None else self._optimizer.step(run_closure)
        except ShardkitError:
            raise
        except Exception as error:
            if error in failures or _is_of_communication(error):
                raise
            raise UsageError(_refusal(self._optimizer, error)) from error


def _refusal(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return (
        f"optimizer step: {kind_of(optimizer).__name__} failed on sharded parameters (got {said}); if it works in one "
        "process, use strategy NO_SHARD, or another optimizer."
    )


_COMMUNICATION = ("torch.distributed.distributed_c10d", "torch.distributed._functional_collectives")


def _is_of_communication(error: Exception) -> bool:
    """Whether it is an error of a collective, as when another rank has ended."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith(_COMMUNICATION) for frame in frames)
