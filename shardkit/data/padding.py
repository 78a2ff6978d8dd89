"""Tells real samples from the padding of a loader's last batch."""

from collections.abc import Iterable, Sequence
from functools import cache
from numbers import Number
from typing import Any

import torch

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.data.loop import Loop, alive
from shardkit.distributed.collectives import Real
from shardkit.distributed.nested import leaves
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)


def real_samples(loaders: Iterable[PreparedLoader], given: Any, as_objects: bool) -> Real | None:
    """What is real in the global batch that `given` belongs to, if that batch is padded; else None.

    `given`: this rank's tensors of the current batch, or a list with one object per sample. UsageError where several
    loaders alternate and the batch is ambiguous.
    """
    is_list = as_objects or not all(isinstance(leaf, torch.Tensor) for leaf in leaves(given))
    real = _real_of_batch(list(loaders), given, is_list)
    if real is not None and real.is_mixed and is_list and not isinstance(given, (list, Number)):
        _warn_of_objects(type(given).__name__)
    return real


def _real_of_batch(loaders: Sequence[PreparedLoader], given: Any, is_list: bool) -> Real | None:
    """As `real_samples`."""
    size = _samples_in(given, is_list)
    ended = [(one, loop) for one in loaders if not one.is_iterating and (loop := one.ended) is not None]
    for loader, loop in ended:
        if _is_of(given, loop):  # the loop is one batch ahead of `given`
            return _real(loader, loop, size, is_list)
    candidates = _read_in_turns(loaders)
    known = [(loader, loop) for loader, loop in candidates if _is_of(given, loop)]
    if not known and any(_is_of_earlier(given, loader.newest_loop) for loader in loaders):
        return None  # only the last batch is padded, and the script has read it ahead
    possible = known or [(loader, loop) for loader, loop in candidates if _may_be_of(size, loop)]
    found = {_real(loader, loop, size, is_list) for loader, loop in possible}
    if len(found) > 1:
        raise UsageError(
            f"gather_for_metrics: {len(possible)} loaders are read alternately, and one of them is at a padded batch "
            f"(got {size} samples, which fit several of them); read one loader after the other, or gather(...) and "
            "drop the padding yourself."
        )
    if not known:
        _warn_of_padding_kept(size, [loop for _, loop in candidates], [loop for _, loop in ended])
    return next(iter(found), None)


def _warn_of_padding_kept(size: int | None, running: Sequence[Loop], ended: Sequence[Loop]) -> None:
    """Warns where values that contain no tensor of a batch may have padding that is not dropped."""
    if any(loop.piece.is_padded for loop in running) and not any(_may_be_of(size, loop) for loop in running):
        _warn_of_other_length()
    since = running[0].last_yield if running else 0
    if any(loop.last_yield > since and _may_be_padded(size, loop) for loop in ended):
        _warn_of_ended_loop()


def short_batch(loaders: Iterable[PreparedLoader], given: Any) -> tuple[int, int] | None:
    """(samples of this rank, real samples of all ranks) in a global batch that is shorter than a whole one, where
    `given` is 1-dim and as long as a rank's whole batch; else None, on all ranks alike.

    Such a tensor is usually the mean of the batch, repeated: `loss.repeat(batch_size)`.
    """
    candidates = _read_in_turns(loaders)
    if len(candidates) != 1:
        return None
    (loader, loop), tensors = candidates[0], leaves(given)
    whole = loader.batch_size
    if whole is None or loop.piece.samples >= loader.total_batch_size or not tensors:
        return None
    is_whole = all(isinstance(leaf, torch.Tensor) and leaf.shape == (whole,) for leaf in tensors)
    return (loop.piece.of_rank, loop.piece.samples) if is_whole else None


def _real(loader: PreparedLoader, loop: Loop, size: int | None, is_list: bool) -> Real | None:
    """What is real in the current batch of a loop over the loader; None where it is not padded.

    Where each rank has a whole batch, those of the first ranks are real. Tensors have `size` rows on every rank then,
    also where the batches differ in length: they cannot be gathered before they are padded.
    """
    if not loop.piece.is_padded:
        return None
    remainder, batches = loop.remainder, loop.piece.batches
    if loader.has_ready_batches:
        return Real(remainder * (1 if size is None else size), remainder)
    if batches is not None:
        return Real(remainder if size is None or is_list else batches * size, batches)
    each = -(-remainder // loader.batches_source.layout.world_size)
    ranks = -(-remainder // each)
    return Real(remainder, ranks, is_mixed=remainder < ranks * each)


def _may_be_of(size: int | None, loop: Loop) -> bool:
    """Whether so many samples may be those of the loop's current batch. Batches of different lengths are padded before
    they are gathered."""
    is_known = size is not None and loop.local_samples is not None and loop.piece.batches is None
    return not is_known or size in (loop.local_samples, loop.piece.of_rank)


def _may_be_padded(size: int | None, loop: Loop) -> bool:
    """Whether so many samples may be all of a loop that has ended with a padded batch, or those of this batch, with
    the padding."""
    is_of_last = size is not None and 1 < size == loop.local_samples  # one value may be anything
    return loop.piece.is_padded and (is_of_last or size == loop.local_total)


def _read_in_turns(loaders: Iterable[PreparedLoader]) -> list[tuple[PreparedLoader, Loop]]:
    """The active loader, and those read alternately with it, as by zip; with their loops. An outer loop has yielded no
    batch since the inner one began."""
    active = active_loader(loaders)
    if active is None:
        return []
    beside = [one for one in loaders if one is not active and one.is_iterating and one.last_yield > active.began]
    return [(one, loop) for one in (active, *beside) if (loop := one.newest_loop) is not None]


def _is_of(given: Any, loop: Loop) -> bool:
    """Whether `given` contains a tensor of the loop's current batch."""
    return _contains(given, alive(loop.tensors))


def _is_of_earlier(given: Any, loop: Loop | None) -> bool:
    """Whether `given` contains a tensor of a batch before the newest, which is padded."""
    if loop is None or not loop.piece.is_padded:
        return False
    return any(_contains(given, alive(tensors)) for tensors in loop.earlier)


def _contains(given: Any, tensors: Iterable[torch.Tensor]) -> bool:
    known = {id(tensor) for tensor in tensors}
    return any(id(leaf) in known for leaf in leaves(given))


def _samples_in(given: Any, is_list: bool) -> int | None:
    """This rank's samples: the length of a list of objects, else of the tensors; None where these differ."""
    if is_list:
        return len(given) if isinstance(given, list) else None
    sizes = {leaf.size(0) for leaf in leaves(given) if leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else None


@cache
def _warn_of_other_length() -> None:
    log.warning(
        "gather_for_metrics: the last batch is padded, but the input has a different length, so no padding is "
        "dropped; pass one value per sample."
    )


@cache
def _warn_of_objects(kind: str) -> None:
    """Of up to one real sample a rank, whole objects are padding, and these are dropped."""
    log.warning(
        "gather_for_metrics: the last batch is padded, but the input is one object for all samples of a rank (got "
        "%s), so no padding is dropped; pass a list with one value per sample, and tensors in a call of their own.",
        kind,
    )


@cache
def _warn_of_ended_loop() -> None:
    log.warning(
        "gather_for_metrics: called after the loop with the values of all its batches, or of the last one if the loop "
        "was read ahead, which was padded: the samples that fill it up are counted too; call it inside the loop, once "
        "for each batch, or with a tensor of the batch beside: gather_for_metrics((predicted, labels))."
    )
