"""Gradients of offloaded parameters that come by two ways.

FSDP computes on the device and adds a unit's gradients to those in host memory, from autograd's thread of the device,
in a copy that may still run when the next operation begins. Gradients of the sharded parameters themselves, as of a
penalty on the weights (`sum(p.pow(2).sum() for p in model.parameters())`), are added on the CPU, by another thread.
Here they take turns, and the CPU waits for the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from shardkit.sharding.hooks import mark_own, taking_hooks

# Longer than the CPU adds to a tensor: where autograd fails in between, it does not end its turn.
PATIENCE_S = 30.0


class Turns:
    """Of a model with parameters in host memory. FSDP takes its turns by `with`."""

    def __init__(self, parameters: Iterable[FSDPParam]) -> None:
        self._lock = threading.Lock()
        self._adding: int | None = None  # the thread that adds a gradient on the CPU
        for parameter in parameters:
            self._hook(parameter)

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _begin(self) -> None:
        """Waits for the other's turn, and takes over one that was never ended."""
        while not self._lock.acquire(timeout=PATIENCE_S):
            if self._adding is not None:
                break
        self._adding = None

    def _hook(self, parameter: FSDPParam) -> None:
        """The hooks keep no record of FSDP alive: the garbage collector does not see references from them."""
        reference, turns = ref(parameter), ref(self)

        def before(gradient: torch.Tensor) -> None:
            own, found = turns(), reference()
            if own is not None and found is not None:
                own.begin_to_add(found)

        def after(_: torch.Tensor) -> None:
            if (own := turns()) is not None:
                own.end_to_add()

        sharded: Any = parameter.sharded_param
        with taking_hooks(sharded):
            torch.Tensor.register_hook(sharded, before)  # a sharded parameter's own refuses scripts
            sharded.register_post_accumulate_grad_hook(mark_own(after))

    def begin_to_add(self, parameter: FSDPParam) -> None:
        """Autograd is about to add a gradient on the CPU."""
        if self._adding != threading.get_ident():  # else an earlier turn of this thread was never ended
            self._begin()
        if parameter.grad_offload_event is not None:
            parameter.grad_offload_event.synchronize()
        self._adding = threading.get_ident()

    def end_to_add(self) -> None:
        """It has. FSDP calls hooks on the gradient, too, from its own turn."""
        if self._adding == threading.get_ident():
            self._adding = None
            self._lock.release()
