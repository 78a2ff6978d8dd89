"""What models' forwards in a region are given beside: the positions of this rank's slice, and labels that are shifted
over the whole sequence."""

from __future__ import annotations

from functools import partial
from inspect import BoundArguments, Parameter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardkit.distributed.tensors import unwrapped
from shardkit.errors import UsageError
from shardkit.sharding.context_parallel import transformers_masks
from shardkit.sharding.context_parallel.first_forward import IGNORED, FirstForward
from shardkit.sharding.context_parallel.region import Region, Slice
from shardkit.signatures import signature


def watch(model: nn.Module, region: Region) -> None:
    """Completes the arguments of a prepared model's forwards in regions, and checks the first of them."""
    if region.group.size == 1:
        return
    inner = unwrapped(model)
    target = next((one for one in inner.modules() if _is_of_transformers(one)), inner)
    if _is_of_transformers(target):
        transformers_masks.install()
    target.register_forward_pre_hook(partial(_complete, region), prepend=True, with_kwargs=True)
    # After it, to run before it: whole sequences are compared with the arguments that the script gives.
    inner.register_forward_pre_hook(partial(_begin, region, FirstForward()), prepend=True, with_kwargs=True)


def _is_of_transformers(module: nn.Module) -> bool:
    return any(one.__name__ == "PreTrainedModel" for one in type(module).__mro__)


def _begin(
    region: Region | None, first: FirstForward, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    if region is None:  # in a pickle of the model
        return
    if torch.is_grad_enabled():
        region.note_forward()
    if region.is_active:
        first.check(region, model, arguments, named)


def _complete(region: Region | None, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The forward's arguments, with those that follow from where this rank's slice is."""
    if region is None or not region.is_active:
        return None
    known = signature(type(model).forward)
    given = known.bind_partial(model, *arguments, **named)
    _set_positions(region, given)
    if _loss_of(model) == "ForCausalLMLoss":
        _drop_mask(region, given)
        _shift_labels(region, given)
    return given.args[1:], given.kwargs


def _loss_of(model: nn.Module) -> str | None:
    """The name of the function by which a model of Transformers computes its loss; None for other models."""
    return getattr(getattr(model, "loss_function", None), "__name__", None)


def _set_positions(region: Region, given: BoundArguments) -> None:
    """`position_ids`, where the forward takes them and the script gives none."""
    takes = "position_ids" in given.signature.parameters
    if takes and given.arguments.get("position_ids") is None and (own := _slice_among(region, given)) is not None:
        each = own.own.size(own.dim)
        start = region.group.rank * each
        given.arguments["position_ids"] = torch.arange(start, start + each, device=own.own.device).unsqueeze(0)


def _slice_among(region: Region, given: BoundArguments) -> Slice | None:
    found = (region.slice_of(value) for value in given.arguments.values())
    return next((one for one in found if one is not None), None)


def _shift_labels(region: Region, given: BoundArguments) -> None:
    """`shift_labels` for a model that would shift the labels of its slice, and leave out a token at each end of one."""
    labels = given.arguments.get("labels")
    more = next((name for name, one in given.signature.parameters.items() if one.kind is Parameter.VAR_KEYWORD), None)
    others = dict(given.arguments.get(more, {})) if more else {}
    if labels is None or others.get("shift_labels") is not None:
        return
    found = region.slice_of(labels)
    if found is None or more is None:
        raise UsageError(
            "context_parallel: the labels are not those that the region has split (got labels of shape "
            f"{list(labels.shape)}), and each slice needs the first label of the next; give context_parallel the "
            "labels of the whole sequence, and the model what it yields, or compute the loss outside of the model."
        )
    whole = F.pad(found.whole.narrow(found.dim, 1, found.whole.size(found.dim) - 1), (0, 1), value=IGNORED)
    given.arguments[more] = {**others, "shift_labels": region.group.part(whole, found.dim)}


def _drop_mask(region: Region, given: BoundArguments) -> None:
    """Leaves out a padding mask that causal attention does not need: of no padding, or of padding at the end whose
    labels are ignored."""
    found = region.slice_of(given.arguments.get("attention_mask"))
    if found is None or found.whole.dim() != 2:
        return
    whole, labels = found.whole.bool(), region.slice_of(given.arguments.get("labels"))
    is_at_end = (whole[:, 1:] <= whole[:, :-1]).all()
    if labels is not None:
        is_at_end &= (labels.whole == IGNORED).logical_or(whole).all()
    if bool(whole.all() if labels is None else is_at_end):
        given.arguments["attention_mask"] = None
