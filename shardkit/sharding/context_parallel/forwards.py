"""What models' forwards in a region are given beside: the positions of this rank's slice, and labels that are shifted
over the whole sequence."""

from __future__ import annotations

from functools import partial
from inspect import BoundArguments, Parameter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardkit.distributed.modules import unwrapped
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding.context_parallel import torch_functions, transformers_masks
from shardkit.sharding.context_parallel.first_forward import FirstForward
from shardkit.sharding.context_parallel.groups import IGNORED, ContextGroup
from shardkit.sharding.context_parallel.region import Region
from shardkit.signatures import signature

log = get_logger(__name__)


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
    inner.register_forward_hook(_end, always_call=True)
    torch_functions.call_at_unwatched(_Unwatched().tell)


class _Unwatched:
    """What is told, once, of attention in a region that no prepared model computes."""

    def __init__(self) -> None:
        self._is_told = False

    def tell(self, group: ContextGroup) -> None:
        if not self._is_told and group.rank == group.first == 0:
            log.warning(
                "context_parallel: attention runs outside of a prepared model's forward, so nothing gives it the "
                "positions of its slice or compares it with whole sequences; prepare each model that has slices (a "
                "teacher or reference: prepare_model(model, evaluation_mode=True)), and call others before the region."
            )
        self._is_told = True


def _is_of_transformers(module: nn.Module) -> bool:
    return any(one.__name__ == "PreTrainedModel" for one in type(module).__mro__)


def _begin(
    region: Region | None, first: FirstForward, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    torch_functions.begin_watched()
    if region is None:  # in a pickle of the model
        return
    if torch.is_grad_enabled():
        region.note_forward()
    if region.is_active:
        first.check(region, model, arguments, named)


def _end(*_: Any) -> None:
    torch_functions.end_watched()


def _complete(region: Region | None, model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The forward's arguments, with those that follow from where this rank's slice is."""
    if region is None or not region.is_active:
        return None
    known = signature(type(model).forward)
    given = known.bind_partial(model, *arguments, **named)
    if _is_of_transformers(model):
        _refuse_unfit(region, type(model).__name__, given)
    _set_positions(region, given)
    if _loss_of(model) == "ForCausalLMLoss":
        _drop_mask(region, given)
        _shift_labels(region, given)
    return given.args[1:], given.kwargs


def _refuse_unfit(region: Region, name: str, given: BoundArguments) -> None:
    """UsageError where a model of Transformers would take the arguments for those of something else."""
    caches = [one for one in given.arguments.values() if hasattr(one, "get_seq_length")]  # named by version
    if cached := max((one.get_seq_length() for one in caches), default=0):
        raise UsageError(
            f"context_parallel: {name} is given keys and values of earlier positions (got {cached} of them, as in "
            "generate); call it outside of the region, where each rank has whole sequences."
        )
    if given.arguments.get("start_positions") is not None:
        raise UsageError(
            f"context_parallel: {name} learns where in a sequence something is (got start_positions), and each rank "
            "would look for it in its slice; train this model with shardkit.mesh.context_size: 1."
        )
    found = _tensor_of_slices(region, given)
    if found is not None and found[0].size(found[1]) == 1:
        size = region.group.size
        raise UsageError(
            f"context_parallel: slices of one position (got sequences of {size}), which {name} takes for a step of "
            f"generation; pad sequences to 2 positions a slice, as with pad_to_multiple_of={2 * size} of a tokenizer "
            "or collator."
        )


def _loss_of(model: nn.Module) -> str | None:
    """The name of the function by which a model of Transformers computes its loss; None for other models."""
    return getattr(getattr(model, "loss_function", None), "__name__", None)


def _set_positions(region: Region, given: BoundArguments) -> None:
    """`position_ids`, where the forward takes them and the script gives none."""
    if "position_ids" not in given.signature.parameters or given.arguments.get("position_ids") is not None:
        return
    if (found := _tensor_of_slices(region, given)) is not None:
        tensor, dim = found
        each = tensor.size(dim)
        start = region.group.rank * each
        given.arguments["position_ids"] = torch.arange(start, start + each, device=tensor.device).unsqueeze(0)


def _tensor_of_slices(region: Region, given: BoundArguments) -> tuple[torch.Tensor, int] | None:
    """An argument that is a slice of the region, or that a script has made of one (moved to a device, some of the
    rows), with its dim of positions."""
    values = [value for value in given.arguments.values() if isinstance(value, torch.Tensor)]
    found = [(value, one.dim) for value in values if (one := region.slice_of(value)) is not None]
    found += [
        (value, one.dim)
        for value in values
        for one in region.slices
        if one.dim < value.dim() and value.size(one.dim) == one.own.size(one.dim)
    ]
    return next(iter(found), None)


def _shift_labels(region: Region, given: BoundArguments) -> None:
    """`shift_labels` for a model that would shift the labels of its slice, and leave out a token at each end of one."""
    labels = given.arguments.get("labels")
    more = next((name for name, one in given.signature.parameters.items() if one.kind is Parameter.VAR_KEYWORD), None)
    others = dict(given.arguments.get(more, {})) if more else {}
    if labels is None or others.get("shift_labels") is not None:
        return
    if others.get("num_items_in_batch") is not None:
        raise UsageError(
            "context_parallel: num_items_in_batch makes the loss a sum over this rank's slice, divided (got "
            f"{int(others['num_items_in_batch'])}); leave it out, for the mean of whole sequences, or compute the loss "
            "outside of the model, with accelerator.sum_slices."
        )
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
