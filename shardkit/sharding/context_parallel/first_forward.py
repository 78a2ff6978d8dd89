"""Checks, before a model's first forward in a region, that slices give what whole sequences give.

Not every model can be split: attention that is not torch's `scaled_dot_product_attention`, convolutions and recurrences
along the sequence, and positions that a model counts from 0 would mix up each slice with a sequence, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardkit.distributed.nested import leaves, map_leaves
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding.context_parallel.region import Region, Slice
from shardkit.signatures import signature

log = get_logger(__name__)

POSITIONS = 64
"""Of each rank's slice, that are compared."""
ALLOWED = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Of the largest value, by dtype; other dtypes round more."""
ALLOWED_IN_16_BITS = 5e-2


class FirstForward:
    """The check of one model."""

    def __init__(self) -> None:
        self._is_done = False

    def check(self, region: Region, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Runs the model without gradients on the first positions of each slice: split, and whole. Raises UsageError on
        all ranks where the results differ. Collective; has an effect once."""
        if self._is_done:
            return
        self._is_done = True
        names = _by_name(model, arguments, named)
        _refuse_packed(region, names.get("position_ids"))
        short = {id(one.own): _short(region, one) for one in region.slices}
        lengths = {one.own.size(one.dim): one.dim for one in region.slices}

        def shortened(leaf: Any) -> Slice | None:
            if not isinstance(leaf, torch.Tensor):
                return None
            if id(leaf) not in short and (dim := _sequence_dim(leaf, lengths)) is not None:
                short[id(leaf)] = _short(region, Slice(leaf, leaf, dim))
            return short.get(id(leaf))

        given = (arguments, named)
        own = map_leaves(lambda leaf: leaf if (one := shortened(leaf)) is None else one.own, given)
        whole = map_leaves(lambda leaf: leaf if (one := shortened(leaf)) is None else one.whole, given)
        with _evaluating(model), _slices(region, list(short.values())):
            of_slices = model(*own[0], **own[1])
            with region.whole_sequences(enabled=False):
                of_whole = model(*whole[0], **whole[1])
        lengths_compared = {one.own.size(one.dim) for one in short.values()}
        padding = short.get(id(names.get("attention_mask")))
        errors = [_error(region, *pair, lengths_compared, padding) for pair in _pairs(of_slices, of_whole)]
        _judge(type(model).__name__, region, max((one for one in errors if one is not None), default=None))


def _by_name(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, by name also where they are given by place."""
    return {**signature(type(model).forward).bind_partial(model, *arguments, **named).arguments, **named}


def _refuse_packed(region: Region, positions: Any) -> None:
    """UsageError where the positions tell of several sequences in one: Transformers would mask them by slice."""
    found = region.slice_of(positions)
    if found is None or found.whole.dim() != 2 or found.dim != 1:
        return
    is_packed = bool((found.whole.diff(dim=1) != 1).any())
    if region.everyone.decide(is_packed, any):
        raise UsageError(
            "context_parallel: position_ids begin again within a row (got several packed sequences), which attention "
            "to one sequence would mix up; give each sequence a row."
        )


def _short(region: Region, found: Slice) -> Slice:
    """The first positions of this rank's slice, and those of all ranks of the group."""
    own = found.own.detach().narrow(found.dim, 0, min(POSITIONS, found.own.size(found.dim))).contiguous()
    return Slice(own, region.group.gathered(own, found.dim), found.dim)


def _sequence_dim(tensor: torch.Tensor, lengths: dict[int, int]) -> int | None:
    """Along which dim a tensor that the script has made of slices has their length."""
    if tensor.dim() == 1:
        return 0 if tensor.size(0) in lengths else None
    return next((dim for dim in lengths.values() if dim < tensor.dim() and tensor.size(dim) in lengths), None)


def _pairs(of_slices: Any, of_whole: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs that belong together, of which each has more than one number: losses of parts are not those of the
    whole."""
    for own, whole in zip(leaves(of_slices), leaves(of_whole), strict=False):
        if isinstance(own, torch.Tensor) and isinstance(whole, torch.Tensor) and own.dim() == whole.dim() > 0:
            yield own, whole


def _error(
    region: Region, own: torch.Tensor, whole: torch.Tensor, lengths: set[int], padding: Slice | None
) -> float | None:
    """The largest difference of an output's values, but those of padding, in units of the allowed one; None where there
    is no comparison."""
    for dim in range(own.dim()):
        if own.size(dim) in lengths and own.size(dim) * region.group.size == whole.size(dim):
            whole = region.group.part(whole, dim)
            break
    if own.shape != whole.shape:
        return None
    if padding is not None and own.shape[:2] == padding.own.shape:
        is_real = padding.own.bool()
        own, whole = own[is_real], whole[is_real]
    if not own.numel():
        return None
    allowed = ALLOWED.get(own.dtype, ALLOWED_IN_16_BITS)
    largest = whole.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((own.double() - whole.double()).abs().max() / largest / allowed)


def _judge(name: str, region: Region, error: float | None) -> None:
    """Raises UsageError on all ranks where one has found too large an error."""

    def judge(errors: list[float | None]) -> float | None:
        known = [one for one in errors if one is not None]
        return None if not known else next((one for one in known if not one <= 1), 0.0)

    found = region.everyone.decide(error, judge)
    if found is None and region.everyone.rank == 0:
        log.warning(
            "context_parallel: %s returns no values along the sequence, so it is not known whether slices give what "
            "whole sequences give; compare the losses of some steps with those of shardkit.mesh.context_size: 1.",
            name,
        )
    elif found:
        raise UsageError(
            f"context_parallel: {name} gives other values for slices of a sequence than for the whole one (got "
            f"{found:.3g} times the allowed difference); it must mix positions only by calling "
            "torch.nn.functional.scaled_dot_product_attention under this name (attn_implementation='sdpa' in "
            "Transformers), and be given the positions of its slice: split them beside the tokens."
        )


@contextmanager
def _slices(region: Region, slices: list[Slice]) -> Iterator[None]:
    found, region.slices = region.slices, slices
    try:
        yield
    finally:
        region.slices = found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode, without gradients and compiled code, and draws no random numbers of the
    script's."""
    were_training = [module for module in model.modules() if module.training]
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    indices = [] if device.type == "cpu" else [device.index or 0]
    for module in were_training:
        module.training = False
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(indices, device_type=device.type if indices else "cuda"),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        for module in were_training:
            module.training = True
