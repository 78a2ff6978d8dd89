"""When and how gradients are exchanged, beside what DDP and FSDP2 do by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.distributed.tensors import is_fsdp
from shardkit.errors import UsageError
from shardkit.sharding import hooks

# Gradients are packed into buffers of this size (DDP's own default), so that reducing takes little memory.
BUCKET_BYTES = 25 << 20


class GradientMean:
    """Parameters that every rank holds whole, and that no engine reduces: at the end of each backward their gradients
    become the mean over all ranks.

    `may_be_unused`: ranks may use different ones; else all ranks must give gradients to the same.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], may_be_unused: bool) -> None:
        self.parameters = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self.sync = True
        self._may_be_unused = may_be_unused

    def reduce(self) -> None:
        """Collective, where gradients are exchanged at all; all ranks reach the end of backward together."""
        if self.sync:
            take_mean_([p for p in self.parameters if p.requires_grad], self._may_be_unused)

    def used(self) -> list[bool]:
        """Which of the parameters have a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]


@torch.no_grad()
def take_mean_(parameters: Sequence[nn.Parameter], may_be_unused: bool) -> None:
    """Replace each gradient by its mean over all ranks. Collective: the same parameters in the same order.

    A rank without a gradient of a parameter takes part with zeros. It gets the mean where `may_be_unused`; else it
    goes on without. Where no rank has a gradient, none is made.
    """
    used = _used_anywhere(parameters) if may_be_unused else [p.grad is not None for p in parameters]
    for bucket in _buckets(parameters):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        for parameter, gradient in zip(bucket, gradients, strict=True):
            parameter.grad = gradient
    for parameter, is_used in zip(parameters, used, strict=True):
        if not is_used:
            parameter.grad = None


def _used_anywhere(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Which parameters have a gradient on any rank. Collective."""
    if not parameters:
        return []
    flags = torch.tensor([int(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Neighbours of one dtype and device, up to BUCKET_BYTES together."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        fits = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not fits or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


class _Pass:
    """A backward under way. Only the engine's callback refers to it, so it lives as long as the backward does."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived: list[torch.Tensor] = []


class EndOfBackward:
    """Calls `then(parameters)` once when a backward in which any of the parameters got gradients is over: with those
    that did, in the order in which they did. As long as somebody holds it.

    A backward inside a backward (reentrant activation checkpointing) belongs to the one around it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], then: Callable[[list[torch.Tensor]], None]) -> None:
        self._then = then
        self._passes: list[ReferenceType[_Pass]] = []
        self._is_open = False
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                hooks.hook_weakly(parameter, self._note)

    def watch(self, output: torch.Tensor) -> None:
        """A backward that comes through this tensor counts from there on, before any parameter gets its gradient."""
        reference = WeakMethod(self._begin)

        def begin(_: torch.Tensor) -> None:
            if (alive := reference()) is not None:
                alive()

        output.register_hook(begin)

    def _note(self, parameter: torch.Tensor) -> None:
        self._begin().arrived.append(parameter)

    def _begin(self) -> _Pass:
        """The pass that this is called in."""
        number = torch._C._current_graph_task_id()  # a new number each time
        for one in self._alive():
            if one.number == number:
                return one
        begun = _Pass(number)
        self._passes.append(ref(begun))
        self._is_open = True
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, begun))
        return begun

    def _alive(self) -> list[_Pass]:
        """Passes under way, the outer first; one that an exception ended is gone with its callback."""
        found = [one for reference in self._passes if (one := reference()) is not None]
        self._passes = [ref(one) for one in found]
        return found

    def has_broken_off(self) -> bool:
        """Whether an exception ended the last backward before it was over."""
        return self._is_open and not hooks.is_in_backward()

    def _end(self, ended: _Pass) -> None:
        around = [one for one in self._alive() if one is not ended]
        self._passes = [ref(one) for one in around]
        if around:
            around[-1].arrived += ended.arrived
            return
        self._is_open = False
        self._then(ended.arrived)


def attach(model: nn.Module, means: GradientMean) -> None:
    """From now on `gradient_sync` of the model also holds for these parameters."""
    vars(model)["_shardkit_gradients"] = means


def watch_backward(model: nn.Module, then: Callable[[list[torch.Tensor]], None]) -> None:
    """As EndOfBackward of the model's parameters, as long as the model lives."""
    vars(model).setdefault("_shardkit_backward", []).append(EndOfBackward(model.parameters(), then))


def _attached(model: nn.Module) -> GradientMean | None:
    return vars(model).get("_shardkit_gradients")


@contextmanager
def gradient_sync(models: Iterable[nn.Module], enabled: bool) -> Iterator[None]:
    """Inside, backward reduces gradients over the ranks (`enabled`) or only adds them up locally.

    Put forward and backward of a micro-batch inside. Without reduction, FSDP holds the gradients of the whole model
    in the reduce dtype on every rank until the next reducing backward: four bytes a parameter for fp32. A model that
    has no room for that is trained with `enabled` in every micro-batch: the same sums, one reduce-scatter more each.
    """
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_synced(model, enabled))
        yield


@contextmanager
def _synced(model: nn.Module, enabled: bool) -> Iterator[None]:
    means = _attached(model)
    with ExitStack() as stack:
        if means is not None:
            stack.enter_context(_set(means, "sync", enabled))
        if isinstance(model, DistributedDataParallel):
            # torch learns a static graph from a backward that exchanges; another before it would be an error.
            learns = model.static_graph and model.is_first_backward
            stack.enter_context(_set(model, "require_backward_grad_sync", enabled or learns))
        for group in _groups_of(model):
            stack.enter_context(_set(group, "reduce_grads", enabled))
            stack.enter_context(_set(group, "all_reduce_grads", enabled))
        yield


def deferred(model: nn.Module) -> AbstractContextManager[None]:
    """For micro-batches before a window's last: DDP exchanges nothing; FSDP still reduces to its shards, or every rank
    would hold a whole model's gradients, but replicas wait with theirs."""
    return _without_all_reduce(model) if is_fsdp(model) else _synced(model, enabled=False)


def finish_deferred(model: nn.Module) -> None:
    """Exchange what `deferred` has left on each rank, where no further micro-batch comes. Collective."""
    if isinstance(model, DistributedDataParallel):
        take_mean_([p for p in model.module.parameters() if p.requires_grad], model.find_unused_parameters)
    if any(group._partial_reduce_output is not None for group in _groups_of(model)):
        raise UsageError(
            "optimizer step: the loop was left in the middle of a window of micro-batches, and replicas of a hybrid "
            "strategy have not exchanged its gradients; let the window end before you step."
        )


def _groups_of(model: nn.Module) -> list[Any]:
    """The parameter groups of the model's units, if it has any."""
    if not any(map(is_fsdp, model.modules())):
        return []
    from shardkit.sharding import fsdp_internals

    return fsdp_internals.groups_of_model(model)


@contextmanager
def _without_all_reduce(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for group in _groups_of(model):
            stack.enter_context(_set(group, "all_reduce_grads", False))
        yield


@contextmanager
def _set(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value, inside."""
    found = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, found)
