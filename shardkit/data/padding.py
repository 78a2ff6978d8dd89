"""Which samples of what a loop hands in are real, and which pad a loader's last batch."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)


def real_samples(loaders: Iterable[PreparedLoader], given: Any, as_objects: bool = False) -> int | None:
    """Samples of the global batch that `given` is about, where padding follows them; None where nothing is padding.

    `given`: this rank's tensors, or a list of one object a sample, of the batch that is out. UsageError where several
    loaders are read in turns and it cannot be known which of their batches it is about.
    """
    loaders = list(loaders)
    ended = [loader for loader in loaders if not loader.is_iterating]
    if ahead := [loader for loader in ended if _is_of(given, loader)]:  # a loop that is one batch ahead
        return ahead[0].last_remainder if ahead[0].last_remainder >= 0 else None
    candidates = _read_in_turns(loaders)
    known = [loader for loader in candidates if _is_of(given, loader)]
    size = _samples_in(given, as_objects)
    possible = known or [loader for loader in candidates if size is None or loader.local_samples in (None, size)]
    found = {loader.remainder for loader in possible}
    if len(found) > 1:
        raise UsageError(
            f"gather_for_metrics: {len(possible)} loaders are read in turns, and one of them is at a padded batch (got "
            f"{size} samples that may be of either); read one loader after the other, or gather(...) and cut by hand."
        )
    if candidates and not possible and any(loader.remainder >= 0 for loader in candidates):
        _warn_of_other_length()
    real = next(iter(found), -1)
    return None if real < 0 else real


def _read_in_turns(loaders: Iterable[PreparedLoader]) -> Sequence[PreparedLoader]:
    """The loader whose batch is out, and those that are read in turns with it, as by zip. A loop around another one has
    given no batch since the inner one began."""
    active = active_loader(loaders)
    if active is None:
        return []
    beside = [one for one in loaders if one is not active and one.is_iterating and one.last_yield > active.began]
    return [active, *beside]


def _is_of(given: Any, loader: PreparedLoader) -> bool:
    """Whether a tensor of the batch that is out is among what is given."""
    batch = {id(tensor) for tensor in loader.batch_tensors()}
    return any(id(leaf) in batch for leaf in tree_leaves(given))


def _samples_in(given: Any, as_objects: bool) -> int | None:
    """This rank's samples: the length of a list of objects, else that of all tensors; None where these differ."""
    leaves = tree_leaves(given)
    if as_objects or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return len(given) if isinstance(given, list) else None
    sizes = {len(leaf) for leaf in leaves if leaf.dim()}
    return sizes.pop() if len(sizes) == 1 else None


@cache
def _warn_of_other_length() -> None:
    log.warning(
        "gather_for_metrics: the last batch is padded, and what was given has another length than it, so nothing is "
        "cut off; give one value a sample."
    )
