"""When and how gradients are reduced, in addition to DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardkit.distributed.modules import every_parameter, is_fsdp
from shardkit.errors import UsageError
from shardkit.sharding import hooks

# Gradients are packed into buffers of this size (DDP's default), which limits the extra memory.
BUCKET_BYTES = 25 << 20


class GradientMean:
    """Replicated parameters that neither DDP nor FSDP reduces. Their gradients are averaged over all ranks at the end
    of each backward.

    `may_be_unused`: ranks may use different ones; otherwise the same parameters must have gradients on all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], may_be_unused: bool) -> None:
        self.parameters = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self.sync = True
        self._may_be_unused = may_be_unused

    def reduce(self) -> None:
        """Average the gradients, unless `sync` is False. Collective."""
        if self.sync:
            take_mean_([p for p in self.parameters if p.requires_grad], self._may_be_unused)

    def leave(self, parameters: Set[int]) -> None:
        """Average the gradients of these parameters (by id) no more: another one does."""
        self.parameters = [p for p in self.parameters if id(p) not in parameters]

    def used(self) -> list[bool]:
        """For each parameter, whether it has a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]


@torch.no_grad()
def take_mean_(parameters: Sequence[nn.Parameter], may_be_unused: bool) -> None:
    """Replace each gradient by its mean over all ranks. Collective, with the same parameters in the same order.

    A rank without a gradient contributes zeros. With `may_be_unused` it gets the mean, else its gradient stays None. If
    no rank has a gradient, all stay None. Raises UsageError for sparse gradients, which do not go into one buffer.
    """
    if not parameters:
        return
    if any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters):
        raise UsageError(
            "backward: sparse gradients are reduced only where each backward follows a forward of the prepared model "
            "(got a second backward, a forward of the inner model, or a window whose last micro-batch has none); "
            "write the loop so, or create the embedding with sparse=False."
        )
    found = [p.grad for p in parameters]
    used = are_used_anywhere(found, parameters[0].device) if may_be_unused else [one is not None for one in found]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    average_(gradients)
    for parameter, gradient, is_used in zip(parameters, gradients, used, strict=True):
        parameter.grad = gradient if is_used else None


def are_used_anywhere(gradients: Sequence[torch.Tensor | None], device: torch.device | str) -> list[bool]:
    """For each parameter, whether any rank has a gradient. Collective."""
    flags = torch.tensor([int(one is not None) for one in gradients], device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def average_(tensors: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by its mean over all ranks. Collective, with the same tensors in the same order."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for tensor, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of consecutive tensors with one dtype and device, of about BUCKET_BYTES."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        fits = not bucket or (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not fits or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket


class _RunningBackward:
    """A running backward. Only autograd's callback refers to it, so it exists as long as the backward runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrived: list[torch.Tensor] = []


class EndOfBackward:
    """Calls `then(parameters)` at the end of each backward in which any of the parameters got gradients: with these
    parameters, in the order of their gradients. Works as long as this object is referenced.

    A nested backward (reentrant activation checkpointing) counts as part of the outer one. One of torch.autograd.grad,
    which leaves no gradients, does not count.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], then: Callable[[list[torch.Tensor]], None]) -> None:
        self._then = then
        self._running: list[ReferenceType[_RunningBackward]] = []
        self._is_open = False
        hooks.track_autograd()
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                hooks.hook_weakly(parameter, EndOfBackward._note, self)

    def watch(self, output: torch.Tensor) -> None:
        """Let a backward through this tensor count already before any parameter gets its gradient."""
        reference = WeakMethod(self._current)

        def begin(_: torch.Tensor) -> None:
            if hooks.accumulates() and (alive := reference()) is not None:
                alive()

        output.register_hook(begin)

    def _note(self, parameter: torch.Tensor) -> None:
        self._current().arrived.append(parameter)

    def _current(self) -> _RunningBackward:
        """The backward that runs now; at its first call it begins here."""
        number = torch._C._current_graph_task_id()  # different in each backward
        for reference in self._running:
            if (one := reference()) is not None and one.number == number:
                return one
        begun = _RunningBackward(number)
        self._running = [*map(ref, self._alive()), ref(begun)]
        self._is_open = True
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, begun))
        return begun

    def _alive(self) -> list[_RunningBackward]:
        """The running backwards, the outer first. One that raised an exception was freed with its callback."""
        return [one for reference in self._running if (one := reference()) is not None]

    def has_broken_off(self) -> bool:
        """Whether the last backward raised an exception."""
        return self._is_open and not hooks.is_in_backward()

    def _end(self, ended: _RunningBackward) -> None:
        around = [one for one in self._alive() if one is not ended]
        self._running = [ref(one) for one in around]
        if around:
            around[-1].arrived += ended.arrived
            return
        self._is_open = False
        self._then(ended.arrived)


def sync_with_model(model: nn.Module, means: GradientMean) -> None:
    """Make `gradient_sync` of the model also control these parameters."""
    vars(model)["_shardkit_gradients"] = means


def _means_of(model: nn.Module) -> GradientMean | None:
    """What `sync_with_model` was given for the model."""
    return vars(model).get("_shardkit_gradients")


def watch_backward(model: nn.Module, then: Callable[[list[torch.Tensor]], None]) -> None:
    """As EndOfBackward for the model's parameters, as long as the model exists."""
    vars(model).setdefault("_shardkit_backward", _Watches()).append(EndOfBackward(every_parameter(model), then))


class _Watches(list[EndOfBackward]):
    """Those of one model: a copy of it has none, and it can be pickled."""

    def __reduce__(self) -> Any:
        return list, ()


@contextmanager
def gradient_sync(models: Iterable[nn.Module], enabled: bool) -> Iterator[None]:
    """A context in which backward reduces gradients over the ranks (`enabled`), or only accumulates them locally.

    Run forward and backward of a micro-batch inside. Without reduction, FSDP keeps the gradients of the whole model in
    the reduce dtype on every rank until the next reducing backward: four bytes per parameter in fp32. If that does not
    fit in memory, use `enabled` in every micro-batch: the sums are the same, with one more reduce-scatter each.
    """
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_synced(model, enabled))
        yield


@contextmanager
def _synced(model: nn.Module, enabled: bool) -> Iterator[None]:
    with ExitStack() as stack:
        if (means := _means_of(model)) is not None:
            stack.enter_context(_set(means, "sync", enabled))
        if isinstance(model, DistributedDataParallel):
            # With static_graph, torch requires that the first backward reduces.
            learns = model.static_graph and model.is_first_backward
            stack.enter_context(_set(model, "require_backward_grad_sync", enabled or learns))
        for group in _groups_of(model):
            stack.enter_context(_set(group, "reduce_grads", enabled))
            stack.enter_context(_set(group, "all_reduce_grads", enabled))
        yield


def deferred(model: nn.Module) -> AbstractContextManager[None]:
    """A context for micro-batches before the last of a window: DDP does not reduce. FSDP still reduces to shards, since
    otherwise every rank would hold the gradients of the whole model, but does not reduce between replicas. The model
    may be a module around a sharded one."""
    return _without_all_reduce(model) if any(map(is_fsdp, model.modules())) else _synced(model, enabled=False)


def reduces(model: nn.Module) -> bool:
    """Whether a backward of the model reduces gradients now: not inside `no_sync`."""
    if isinstance(model, DistributedDataParallel):
        return model.require_backward_grad_sync
    if is_fsdp(model):
        from shardkit.sharding.fsdp import internals

        return internals.reduces(model)
    means = _means_of(model)
    return means is None or means.sync


def reduce_deferred(model: nn.Module) -> None:
    """Reduce the gradients that backwards left on each rank, if no further one follows. Collective. (Those of a hybrid
    strategy may still wait for their reduction between replicas.) Under DDP not inside `no_sync`: a step there, such as
    that of local SGD, is of each rank alone."""
    if isinstance(model, DistributedDataParallel):
        if not model.require_backward_grad_sync:
            return
        reached = [p for p in every_parameter(model.module) if p.requires_grad or p.grad is not None]
        take_mean_(reached, model.find_unused_parameters)
    elif is_fsdp(model):
        from shardkit.sharding.fsdp import internals

        with _synced(model, enabled=True):
            internals.end_backward(model)
    elif (means := _means_of(model)) is not None:
        means.reduce()


def is_partly_reduced(model: nn.Module) -> bool:
    """Whether gradients that `deferred` left wait for their reduction between the replicas of a hybrid strategy."""
    return bool(partly_reduced_groups(model))


def refuse_unreduced(model: nn.Module, parameters: Set[int]) -> None:
    """Raises UsageError if gradients of these parameters (by id) are still not reduced between the replicas of a hybrid
    strategy."""
    if any(id(p) in parameters for group in partly_reduced_groups(model) for p in parameters_of_group(group)):
        raise UsageError(
            "optimizer step: the accumulation window is incomplete: gradients are not reduced between the replicas of "
            "a hybrid strategy (got a step before the last micro-batch, or units that no backward in it reached); "
            "step after the end of the window, with a backward through all units in its last micro-batch, set "
            "shardkit.ddp_find_unused_parameters: true where blocks are skipped, or update torch to 2.15."
        )


def drop_unreduced(model: nn.Module, parameters: Set[int]) -> None:
    """Drop the gradients of these parameters (by id) that wait for their reduction over the ranks, or between the
    replicas of a hybrid strategy. UsageError of the latter where a unit has others too: torch keeps a unit's gradients
    in one buffer."""
    if not (groups := _groups_of(model)):
        return
    from shardkit.sharding.fsdp import internals

    for parameter in (one for group in groups for one in group.fsdp_params if id(one.sharded_param) in parameters):
        internals.forget_gradient(parameter)
    for group in partly_reduced_groups(model):
        held = parameters_of_group(group)
        if not any(id(p) in parameters for p in held):
            continue
        if any(p.requires_grad and id(p) not in parameters for p in held):
            raise UsageError(
                "zero_grad: the gradients of a unit wait for their reduction between the replicas of a hybrid "
                "strategy, and the optimizer has only some of its parameters (got no backward through the unit in the "
                "window's last micro-batch); use one optimizer for each unit, or a strategy that is not hybrid."
            )
        internals.forget_partial_sums(group)


def partly_reduced_groups(model: nn.Module) -> list[Any]:
    """The FSDP parameter groups whose gradients wait for their reduction between replicas."""
    return [group for group in _groups_of(model) if group._partial_reduce_output is not None]


def parameters_of_group(group: Any) -> list[nn.Parameter]:
    return [parameter.sharded_param for parameter in group.fsdp_params]


def has_gradients(model: nn.Module) -> bool:
    """Whether any parameter has a gradient, also one that `deferred` or `no_sync` has not reduced yet."""
    if any(parameter.grad is not None for parameter in every_parameter(model)):
        return True
    if not (groups := _groups_of(model)):
        return False
    from shardkit.sharding.fsdp.internals import has_gradient

    return any(
        group._partial_reduce_output is not None or any(map(has_gradient, group.fsdp_params)) for group in groups
    )


def _groups_of(model: nn.Module) -> list[Any]:
    """The FSDP parameter groups of the model; empty without FSDP."""
    if not any(map(is_fsdp, model.modules())):
        return []
    from shardkit.sharding.fsdp import internals

    return internals.groups_of_model(model)


@contextmanager
def _without_all_reduce(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for group in _groups_of(model):
            stack.enter_context(_set(group, "all_reduce_grads", False))
        yield


@contextmanager
def _set(holder: Any, name: str, value: Any) -> Iterator[None]:
    """A context with another value of an attribute."""
    found = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, found)
