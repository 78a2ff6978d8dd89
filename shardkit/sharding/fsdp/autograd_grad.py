"""`torch.autograd.grad(loss, parameters)` and `loss.backward(inputs=parameters)` for sharded parameters.

A forward computes with gathered parameters, so torch finds no path from its output to the sharded ones. Here the
gathered ones take their place. `backward` then leaves FSDP to reduce their gradients, as in any backward. What `grad`
returns is what `backward` would leave in `.grad`: the mean over the ranks, sharded like the parameter. With
create_graph=True it has a graph, for penalties on gradients and products with a Hessian matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakSet, ref

import torch
from torch._guards import TracingContext
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.distributed.tensors import is_dtensor, is_transformed, own_part, sharded_like, whole
from shardkit.errors import UsageError
from shardkit.sharding.gradient_sync import are_used_anywhere, average_
from shardkit.sharding.hooks import wrap_backward
from shardkit.sharding.mixed_losses import keep_plain

_records: Any = WeakIdKeyDictionary()
"""A weak reference to FSDP2's record of each sharded parameter that was gathered once."""


def redirect(parameter: FSDPParam) -> None:
    """Makes gradients for the sharded parameter those of its gathered one."""
    _install()
    _records[parameter.sharded_param] = ref(parameter)


@cache
def _install() -> None:
    wrap_backward(_run_backward)


def _run_backward(
    run: Callable[..., Any],
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Runs with gathered parameters in the place of sharded ones. Collective where `inputs` has such."""
    if TracingContext.try_get() is not None:  # torch.compile's own, through a function of sharded parameters
        return run(
            outputs, gradients, retain_graph, create_graph, inputs, allow_unreachable, accumulate_grad=accumulate_grad
        )
    for output in outputs:
        keep_plain(output)
    gathered = {number: tensor for number, one in enumerate(inputs) if (tensor := _gathered(one)) is not None}
    if gathered and any(one is not None and torch._C._functorch.is_legacy_batchedtensor(one) for one in gradients):
        raise UsageError(
            "torch.autograd.grad: gradients of sharded parameters are not computed in batches (got "
            "is_grads_batched=True); call it once for each of grad_outputs."
        )
    all_inputs, may_miss = (*inputs, *gathered.values()), allow_unreachable or bool(gathered)
    found = run(outputs, gradients, retain_graph, create_graph, all_inputs, may_miss, accumulate_grad=accumulate_grad)
    if create_graph and not accumulate_grad and not is_transformed():
        _note_graph(found)
    if accumulate_grad or not gathered:
        return found
    return _with_means(inputs, list(gathered), found, allow_unreachable)


def _with_means(
    inputs: Sequence[Any], sharded: Sequence[int], found: Sequence[torch.Tensor | None], may_miss: bool
) -> tuple[Any, ...]:
    """What `grad` returns, where `found` has the gradients of all inputs and after them those of the gathered
    parameters of the sharded ones, by their numbers. Collective."""
    results: list[Any] = list(found[: len(inputs)])
    means = _means([inputs[number] for number in sharded], found[len(inputs) :])
    for number, mean in zip(sharded, means, strict=True):
        direct = results[number]
        results[number] = mean if direct is None else direct if mean is None else direct + mean
    if not may_miss and any(one is None for one in results):
        raise RuntimeError(
            "torch.autograd.grad: an input does not appear to have been used in the graph of the outputs (got "
            f"number {results.index(None)} of {len(inputs)}); leave it out, or set allow_unused=True."
        )
    return tuple(results)


class _Graph:
    """A graph of gradients that no backward has come through. It lives as long as the graph, whose hooks hold it."""


_waiting: WeakSet[_Graph] = WeakSet()


def _note_graph(gradients: Sequence[torch.Tensor | None]) -> None:
    graph = _Graph()
    for gradient in gradients:
        if gradient is not None and gradient.requires_grad:
            gradient.register_hook(partial(_come_through, graph))
            _waiting.add(graph)


def _come_through(graph: _Graph, _: torch.Tensor) -> None:
    _waiting.discard(graph)


def is_graph_waiting() -> bool:
    """Whether a backward may still come through a graph of gradients, which refers to gathered parameters."""
    return bool(_waiting)


def _gathered(value: Any) -> torch.Tensor | None:
    """The gathered parameter of a sharded one that is trained; None of anything else."""
    record = _records.get(value) if is_dtensor(value) else None
    parameter = None if record is None else record()
    if parameter is None or parameter.sharded_param is not value:
        return None
    gathered = parameter._unsharded_param
    return gathered if gathered.requires_grad else None


def _means(parameters: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> Sequence[Any]:
    """The mean of each gradient over the ranks, sharded like its parameter; None where no rank has one. Collective."""
    used = are_used_anywhere(gradients, parameters[0].device_mesh.device_type)
    own = [
        torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device_mesh.device_type)
        if gradient is None
        else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    means = _MeanOfGradients.apply(parameters, *own)
    return [mean if is_used else None for mean, is_used in zip(means, used, strict=True)]


class _MeanOfGradients(torch.autograd.Function):
    """Gradients of this rank's samples, whole -> their means over the ranks, sharded like the parameters.

    What is computed from the means counts once, as a penalty on weights does, while FSDP takes the mean over the ranks
    of what its backward gives to each rank: so that is not divided by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, parameters: Sequence[Any], *gradients: torch.Tensor) -> Any:
        ctx.dtypes = [gradient.dtype for gradient in gradients]
        means = [gradient.to(p.dtype, copy=True) for p, gradient in zip(parameters, gradients, strict=True)]
        average_(means)
        return tuple(
            sharded_like(own_part(mean, p).to(p.device, copy=True), p)
            for p, mean in zip(parameters, means, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *of_means: Any) -> Any:
        local = [whole(one) if is_dtensor(one) else one for one in of_means]  # plain ones are whole, and equal
        return None, *(None if one is None else one.to(dtype) for one, dtype in zip(local, ctx.dtypes, strict=True))
