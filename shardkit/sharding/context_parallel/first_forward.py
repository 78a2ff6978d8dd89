"""Checks, before a model's first forward in a region, that slices give what whole sequences give.

Not every model can be split: attention that is not torch's `scaled_dot_product_attention`, convolutions and recurrences
along the sequence, and positions that a model counts from 0 would mix up each slice with a sequence, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from shardkit.distributed.nested import leaves, map_leaves
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding.context_parallel.groups import IGNORED
from shardkit.sharding.context_parallel.region import Region, Slice
from shardkit.signatures import signature

log = get_logger(__name__)

POSITIONS = 61
"""Of each rank's slice, that are compared: a prime, which other lengths in a model are not."""
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
        self._is_done = True  # the forwards below come here, too
        try:
            self._compare(region, model, arguments, named)
        except BaseException:
            self._is_done = False  # for a script that goes on
            raise

    @_disable_dynamo  # also where the script compiles what calls the model
    def _compare(self, region: Region, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        names = _by_name(model, arguments, named)
        _refuse_packed(region, names.get("position_ids"))
        firsts = _FirstPositions(region)
        of_region = list(firsts.known.values())
        labels = firsts.known.get(id(names.get("labels")))
        if labels is not None and not labels.own.is_floating_point():
            apart = names["labels"].view_as(names["labels"])  # from the tokens, which often are the labels, too
            of_region.append(firsts.known.setdefault(id(apart), _labels_at_borders(region, labels)))
            arguments, named = _with_labels(model, arguments, named, apart)
        given_own = firsts.replaced((arguments, named), lambda first: first.own)
        given_whole = firsts.replaced((arguments, named), lambda first: first.whole)
        with _evaluating(model), _slices(region, of_region):
            of_slices = _of_slices(model, *given_own)
            with region.whole_sequences(enabled=False):
                of_whole = model(*given_whole[0], **given_whole[1])
        errors, pooled = _errors(firsts, of_slices, of_whole, firsts.known.get(id(names.get("attention_mask"))))
        is_lost = labels is not None and region.group.rank > 0 and _is_lost(of_slices, of_whole)
        _judge(type(model).__name__, region, _largest(errors), _largest(pooled), is_lost)


class _FirstPositions:
    """The first positions of this rank's slices, and those of all ranks of the group."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._dims = {one.own.size(one.dim): one.dim for one in region.slices}
        """By length of a slice, the dim along which sequences of it are split."""
        longest_first = enumerate(sorted(self._dims, reverse=True))
        # Lengths that differ also do after this: attention takes keys that are as long as the queries for slices.
        self._compared = {own: min(own, POSITIONS - number) for number, own in longest_first}
        self.known = {id(one.own): self._first_of(one) for one in region.slices}
        """By the id of the tensor that the script has."""

    @property
    def lengths(self) -> set[int]:
        """Of those of this rank."""
        return {one.own.size(one.dim) for one in self.known.values()}

    def _first_of(self, found: Slice) -> Slice:
        own = found.own.detach().narrow(found.dim, 0, self._compared[found.own.size(found.dim)]).contiguous()
        return Slice(own, self.region.group.gathered(own, found.dim), found.dim)

    def replaced(self, given: Any, part: Callable[[Slice], torch.Tensor]) -> Any:
        """Arguments of a forward, with a part of these for each slice, and for each tensor that the script has made of
        slices. Collective."""

        def of(leaf: Any) -> Any:
            first = self._of(leaf) if isinstance(leaf, torch.Tensor) else None
            return leaf if first is None else part(first)

        return map_leaves(of, given)

    def _of(self, tensor: torch.Tensor) -> Slice | None:
        if id(tensor) not in self.known and (dim := _sequence_dim(tensor, self._dims)) is not None:
            found = self._first_of(Slice(tensor, tensor, dim))
            if _is_of_slices(tensor, found, self.region.group.size):
                self.known[id(tensor)] = found
        return self.known.get(id(tensor))


def _errors(
    firsts: _FirstPositions, of_slices: Any, of_whole: Any, padding: Slice | None
) -> tuple[list[float | None], list[float | None]]:
    """The errors of all outputs; and those of outputs that are of the whole sequence, as a class or a mean is."""
    # Of more than one number each: losses of parts are not those of the whole.
    pairs = [pair for pair in _pairs(of_slices, of_whole) if pair[0].dim() > 0]
    lengths = firsts.lengths
    errors = [_error(firsts.region, *pair, lengths, padding) for pair in pairs]
    return errors, [error for error, (own, whole) in zip(errors, pairs, strict=True) if own.shape == whole.shape]


def _labels_at_borders(region: Region, labels: Slice) -> Slice:
    """The labels, but the first of each slice after the first ignored: those that are lost where a model shifts them
    within its slice."""
    own = torch.full_like(labels.own, IGNORED)
    if region.group.rank > 0:
        own.narrow(labels.dim, 0, 1).copy_(labels.own.narrow(labels.dim, 0, 1).clamp_min(0))
    return Slice(own, region.group.gathered(own, labels.dim), labels.dim)


def _is_lost(of_slices: Any, of_whole: Any) -> bool:
    """Whether a loss of the labels at borders is one of no labels in slices."""
    return any(
        bool(whole.isfinite() & (whole != 0) & (own.isnan() | (own == 0)))
        for own, whole in _pairs(of_slices, of_whole)
        if own.dim() == 0
    )


def _of_slices(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The forward of slices. Raises UsageError where it fails by what it is given."""
    try:
        return model(*arguments, **named)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise UsageError(
            f"context_parallel: {type(model).__name__} fails with slices of a sequence (got {type(error).__name__}: "
            f"{error}); give context_parallel each tensor that has a dim of positions, and no other one, and let the "
            "model make masks and the like for the positions that it is given."
        ) from error


def _by_name(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, by name also where they are given by place."""
    return {**signature(type(model).forward).bind_partial(model, *arguments, **named).arguments, **named}


def _with_labels(
    model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], labels: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward with other labels."""
    if "labels" in named:
        return arguments, {**named, "labels": labels}
    given = signature(type(model).forward).bind_partial(model, *arguments, **named)
    given.arguments["labels"] = labels
    return given.args[1:], given.kwargs


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


def _sequence_dim(tensor: torch.Tensor, dims: dict[int, int]) -> int | None:
    """Along which dim a tensor that the script has made of slices has their length; `dims`: by length of a slice."""
    if tensor.dim() == 1:
        return 0 if tensor.size(0) in dims else None
    return next((dim for dim in dims.values() if dim < tensor.dim() and tensor.size(dim) in dims), None)


def _is_of_slices(tensor: torch.Tensor, found: Slice, size: int) -> bool:
    """Whether a tensor as long as a slice is made of one: what is whole on each rank, such as a condition whose width
    is a slice's length, is the same on all of them."""
    parts = found.whole.chunk(size, found.dim)
    return not tensor.is_floating_point() or any(not torch.equal(one, parts[0]) for one in parts[1:])


def _pairs(of_slices: Any, of_whole: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs that belong together."""
    for own, whole in zip(leaves(of_slices), leaves(of_whole), strict=False):
        if isinstance(own, torch.Tensor) and isinstance(whole, torch.Tensor) and own.dim() == whole.dim():
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


def _largest(errors: list[float | None]) -> float | None:
    """The largest of those that are known, not a number where one is not."""
    known = [one for one in errors if one is not None]
    return next((one for one in known if one != one), max(known, default=None))


def _judge(name: str, region: Region, error: float | None, pooled: float | None, is_lost: bool) -> None:
    """Raises UsageError on all ranks where one has found too large an error, of any value or of one of the whole
    sequence, or a loss without the labels at borders."""

    def judge(answers: list[list[float | None]]) -> list[float | None]:
        return [_largest([answer[place] for answer in answers]) for place in (0, 1, 2)]

    found, of_pooled, lost = region.everyone.decide([error, pooled, float(is_lost)], judge)
    if lost:
        raise UsageError(
            f"context_parallel: {name} shifts the labels within each slice, which then lacks the label that follows it "
            "(got no loss from the first labels of slices); shift them before, over the whole sequence, and compute "
            "the loss outside of the model."
        )
    if found is None and region.everyone.rank == 0:
        log.warning(
            "context_parallel: %s returns no values along the sequence, so it is not known whether slices give what "
            "whole sequences give; compare the losses of some steps with those of shardkit.mesh.context_size: 1.",
            name,
        )
    elif of_pooled is not None and not of_pooled <= 1:
        raise UsageError(
            f"context_parallel: {name} returns values of a whole sequence, such as its class or its mean (got "
            f"{of_pooled:.3g} times the allowed difference), which each rank would take from its slice; only what has "
            "a dim of positions can be computed in slices: train this model with shardkit.mesh.context_size: 1."
        )
    elif found is not None and not found <= 1:
        raise UsageError(
            f"context_parallel: {name} gives other values for slices of a sequence than for the whole one (got "
            f"{found:.3g} times the allowed difference); it must mix positions only in torch.nn.functional's "
            "scaled_dot_product_attention (attn_implementation='sdpa' in Transformers; need_weights=False of "
            "nn.MultiheadAttention), be given the positions of its slice, split beside the tokens, and what it "
            "attends to but in self-attention (an encoder's input, a condition) whole."
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
