"""Positions in the data, and whether a saved one is valid for the data at hand."""

import base64
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from shardkit import values
from shardkit.data import hugging_face
from shardkit.data.sampler import COMPUTED, DRAWN_WHOLE, ORDERS, length_of
from shardkit.distributed.tensors import bytes_of
from shardkit.log import get_logger

log = get_logger(__name__)

EPOCH_IS_OVER = "epoch is over"
"""Stored in place of a stream's own state after the last batch of an epoch: datasets reset there, so their state would
mean the start of the epoch. Of a map-style dataset too, so that its sampler need not be read to know it."""

MOST_STATE_BYTES = 2**20
"""Of a tensor in a dataset's own state. The states of random generators have some thousand bytes."""

REMEDIES = (
    "load_state_dict(state, restart_epoch=True) to restart the epoch, or load_state(..., data_position=False) to "
    "ignore the saved position"
)


@dataclass(frozen=True)
class Position:
    """A position in the data, in samples over all ranks. `dataset`: a stream's own state, where it has one; where a
    custom sampler gives the order, digests of the epoch's first items.
    `may_exceed`: the script has skipped so many samples, and an epoch may have fewer.
    `may_be_over`: a loader beside this one was at its end, so that the rest of the epoch is dropped unless the first
    iterator after a load reads it."""

    epoch: int = 0
    samples: int = 0
    dataset: Any = None
    order: str = COMPUTED
    may_exceed: bool = False
    may_be_over: bool = False

    @property
    def at_an_end(self) -> str:
        """The note of a loop from this restored position, which is after the last batch."""
        return (
            f"data: the restored position is the end of epoch {self.epoch}, so this loop has no batches; the next one "
            f"runs epoch {self.epoch + 1}."
        )

    def dropped_by(self, epoch: int) -> str:
        """The warning of a `set_epoch(epoch)` that drops this restored position."""
        return (
            f"data: set_epoch({epoch}) drops the restored position (epoch {self.epoch}, after {self.samples:,} "
            "samples); start the epoch loop at loader.epoch, or do not call set_epoch."
        )


def saved_position(state: Mapping[str, Any]) -> Position:
    """The position in a loader's saved state. A new epoch uses this version's order, regardless of the version that
    saved it."""
    if not state["samples_seen"]:
        return Position(int(state["epoch"]))
    own_state = values.decode(state.get("dataset"), _from_text)  # as `stored_state` gave it
    may_be_over = bool(state.get("may_be_over"))
    return Position(
        int(state["epoch"]), int(state["samples_seen"]), own_state, order_of(state), may_be_over=may_be_over
    )


def stored_state(state: Any, dataset: Any, rank: int) -> Any:
    """The dataset's own state as JSON values; None, with a warning of rank 0, where it cannot be stored so: the
    position is then reached by reading."""
    try:
        return values.encode(state, "state_dict()", _as_text)
    except (values.NotStorable, RecursionError) as error:
        if rank == 0:
            _warn_of_state(type(dataset).__name__, str(error))
        return None


def _as_text(path: str, value: Any) -> str | None:
    """A tensor or an array, such as the state of a random generator, with its bytes; None for other values."""
    numpy: Any = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    if not (is_array or isinstance(value, torch.Tensor)):
        return None
    try:
        tensor = torch.from_numpy(value) if is_array else value
        if tensor.nbytes > MOST_STATE_BYTES:
            raise ValueError(f"it has {tensor.nbytes:,} bytes, more than 1 MiB")
        data = base64.b64encode(bytes_of(tensor)).decode()
    except (TypeError, ValueError, RuntimeError) as error:
        what = f"{path}: {'an array' if is_array else 'a tensor'} cannot be saved ({error})"
        raise values.NotStorable(f"{what}; return a smaller or a plain one.") from error
    return json.dumps([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), is_array, data])


def _from_text(text: str) -> Any:
    dtype, shape, is_array, data = json.loads(text)
    found, kind = bytearray(base64.b64decode(data)), getattr(torch, dtype)
    flat = torch.frombuffer(found, dtype=kind) if found else torch.empty(0, dtype=kind, device="cpu")
    return flat.reshape(shape).numpy() if is_array else flat.reshape(shape)


@cache
def _warn_of_state(dataset: str, reason: str) -> None:
    log.warning(
        "data: the state of %s cannot be saved, so a resumed run reads and drops the samples before its position, "
        "which is exact only where they are the same again. %s",
        dataset,
        reason,
    )


def order_of(state: Mapping[str, Any]) -> str:
    """The order that the saved position counts in."""
    return state.get("order", DRAWN_WHOLE)


def facts_of(dataset: Any, split: tuple[int, int] | None, sampler: str | None = None) -> dict[str, Any]:
    """What a position in the data depends on, JSON-able: now, since a dataset may grow between epochs. `sampler`: the
    class that orders a map-style dataset."""
    return {
        "dataset_length": length_of(dataset) if split is None else None,
        "split": None if split is None else split[1],
        "shuffle": hugging_face.shuffle_digest(dataset),
        "sampler": sampler,
    }


def misfit(state: Mapping[str, Any], facts: Mapping[str, Any], saved_ranks: int | None) -> str | None:
    """Why a saved position is not valid for data with these facts, and what to do; None where it is.

    `saved_ranks` is used where the state does not record how many ranks a stream was split over (version 0.1).
    """
    own, saved = facts["dataset_length"], state.get("dataset_length")
    if saved != own:
        return (
            f"the dataset's length has changed since the position was saved (got {_count(own)}, saved "
            f"{_count(saved)}); use the same data, or {REMEDIES}"
        )
    if not state["samples_seen"] or state.get("dataset") == EPOCH_IS_OVER:
        return None  # an epoch starts on any number of ranks
    if order_of(state) not in ORDERS:
        return (
            f"the saved position uses an order that this version does not know (got {order_of(state)!r}); use a newer "
            "version"
        )
    own, saved = facts["split"], state.get("split", saved_ranks if facts["split"] else None)
    if saved != own:
        return (
            f"the stream is split over ranks differently than when the position was saved (got {_split(own)}, saved "
            f"{_split(saved)}); split it as before, or {REMEDIES}"
        )
    if state.get("shuffle") not in (None, facts["shuffle"]):
        return (
            "the stream is shuffled in a different order than when the position was saved (no seed?); give its "
            f"shuffle(seed=...) the same number as before, or {REMEDIES}"
        )
    if state.get("sampler") not in (None, facts["sampler"]):
        return (
            "another sampler orders the samples than when the position was saved (got "
            f"{facts['sampler'] or 'a stream'}, saved {state['sampler']}); use the same shuffle or sampler, or "
            f"{REMEDIES}"
        )
    return None


def inside_loop(state: Mapping[str, Any]) -> str:
    """Why a saved position cannot be loaded while its loader is being read."""
    return (
        "a position cannot be loaded inside the loop over its loader, which cannot be moved (got epoch "
        f"{state['epoch']}, {state['samples_seen']:,} samples); leave the loop, and any except clause, before "
        "loading, delete iterators of the loader, or use load_state(..., data_position=False)"
    )


def _split(ranks: int | None) -> str:
    return "a whole stream" if ranks is None else f"{ranks} parts"


def _count(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"
