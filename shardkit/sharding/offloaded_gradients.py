"""Gradients of offloaded parameters that come by two ways.

FSDP computes on the device and adds a unit's gradients to those in host memory, from autograd's thread of the device,
in a copy that may still run when the next operation begins. Gradients of the sharded parameters themselves, as of a
penalty on the weights (`sum(p.pow(2).sum() for p in model.parameters())`), are added on the CPU, by another thread.
Here they take turns, and the CPU waits for the copy; so does FSDP before a script's hook reads the gradient, as an
optimizer in backward does (torch waits there from 2.13 on).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from shardkit.sharding.hooks import is_own, mark_own, taking_hooks
from shardkit.sharding.parameters import post_accumulate_hooks_of

# Longer than the CPU adds to a tensor: where autograd fails in between, it does not end its turn.
PATIENCE_S = 30.0


class Turns:
    """Of a model with parameters in host memory."""

    def __init__(self, parameters: Iterable[FSDPParam]) -> None:
        self._lock = threading.Lock()
        self._adding: int | None = None  # the thread that adds a gradient on the CPU
        for parameter in parameters:
            self._hook(parameter)

    @contextmanager
    def of_fsdp(self, parameters: Iterable[FSDPParam]) -> Iterator[None]:
        """FSDP's turn, in which it adds the gradients of these parameters."""
        self._begin()
        try:
            with _copied_beside_the_device(parameters):
                yield
        finally:
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


@contextmanager
def _copied_beside_the_device(parameters: Iterable[FSDPParam]) -> Iterator[None]:
    """Inside, FSDP does not wait for the copies of the gradients, but for those that a script's hook reads at once. The
    hooks above read none, so they are hidden: torch waits where there is any hook."""
    before: list[tuple[Any, str, Any]] = []
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in parameters:
            tensor: Any = parameter.sharded_param
            if not all(map(is_own, post_accumulate_hooks_of(tensor))):
                before.append((parameter, "pin_memory", parameter.pin_memory))
                parameter.pin_memory = False
            elif post_accumulate_hooks_of(tensor):
                before.append((tensor, "_post_accumulate_grad_hooks", tensor._post_accumulate_grad_hooks))
                tensor._post_accumulate_grad_hooks = {}
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            for owner, name, value in before:
                setattr(owner, name, value)
