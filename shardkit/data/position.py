"""Positions in the data, and whether a saved one is valid for the data at hand."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.data import hugging_face
from shardkit.data.sampler import COMPUTED, DRAWN_WHOLE, ORDERS

EPOCH_IS_OVER = "epoch is over"
"""Stored in place of a stream's own state after the last batch of an epoch: datasets reset there, so their state would
mean the start of the epoch. Of a map-style dataset too, so that its sampler need not be read to know it."""

REMEDIES = (
    "load_state_dict(state, restart_epoch=True) to restart the epoch, or load_state(..., data_position=False) to "
    "ignore the saved position"
)


@dataclass(frozen=True)
class Position:
    """A position in the data, in samples over all ranks; `dataset` is the dataset's own state, where it has one.
    `may_exceed`: the script has skipped so many samples, and an epoch may have fewer."""

    epoch: int = 0
    samples: int = 0
    dataset: Any = None
    order: str = COMPUTED
    may_exceed: bool = False


def saved_position(state: Mapping[str, Any]) -> Position:
    """The position in a loader's saved state. A new epoch uses this version's order, regardless of the version that
    saved it."""
    if not state["samples_seen"]:
        return Position(int(state["epoch"]))
    return Position(int(state["epoch"]), int(state["samples_seen"]), state.get("dataset"), order_of(state))


def storable(dataset_state: Any) -> Any:
    """The dataset's own state, where it consists of JSON values; else None, and the position is reached by reading."""
    try:
        json.dumps(dataset_state, allow_nan=False)
    except (TypeError, ValueError):
        return None
    return dataset_state


def order_of(state: Mapping[str, Any]) -> str:
    """The order that the saved position counts in."""
    return state.get("order", DRAWN_WHOLE)


def facts_of(
    dataset: Any, length: int | None, split: tuple[int, int] | None, sampler: str | None = None
) -> dict[str, Any]:
    """What a position in the data depends on, JSON-able. `sampler`: the class that orders a map-style dataset."""
    return {
        "dataset_length": length if split is None else None,
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


def _split(ranks: int | None) -> str:
    return "a whole stream" if ranks is None else f"{ranks} parts"


def _count(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"
