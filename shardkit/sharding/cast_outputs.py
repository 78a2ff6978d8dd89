"""Outputs of a model in another dtype than the one in which forward computes.

A script may differentiate by an output: the penalty on path lengths of StyleGAN2 is `torch.autograd.grad(image.sum(),
latents)`, with both from one forward. The image was computed from the latents before their cast, so the gradient is
the one for these: what it would be if nothing were cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.weak import WeakIdKeyDictionary

from shardkit.distributed.tensors import is_transformed
from shardkit.sharding.hooks import wrap_backward

_casts: Any = WeakIdKeyDictionary()
"""For each cast output, the node of its cast and the place of the value before it."""


def cast_output(output: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The output in this dtype, if there is one, and the output is a floating point tensor."""
    if dtype is None or not output.is_floating_point() or output.dtype == dtype:
        return output
    result = output.to(dtype)
    if output.grad_fn is not None and not torch.compiler.is_compiling() and not is_transformed():
        _install()
        _casts[result] = (result.grad_fn, get_gradient_edge(output))
    return result


@cache
def _install() -> None:
    wrap_backward(_run_backward)


def _run_backward(
    run: Callable[..., Any],
    outputs: Any,
    gradients: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    places = {} if accumulate_grad else {number: place for number, one in enumerate(inputs) if (place := _before(one))}
    by = tuple(places.get(number, one) for number, one in enumerate(inputs)) if places else inputs
    found = run(outputs, gradients, retain_graph, create_graph, by, allow_unreachable, accumulate_grad=accumulate_grad)
    if not places:
        return found
    dtypes = [inputs[number].dtype if number in places else None for number in range(len(inputs))]
    return tuple(
        one if one is None or dtype is None else one.to(dtype) for one, dtype in zip(found, dtypes, strict=True)
    )


def _before(value: Any) -> GradientEdge | None:
    """The place of the value before the cast of this output; None of anything else, and of an output that was changed
    in place since."""
    node, place = _casts.get(value, (None, None)) if isinstance(value, torch.Tensor) else (None, None)
    return place if node is not None and value.grad_fn is node else None
