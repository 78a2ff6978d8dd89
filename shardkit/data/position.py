"""Places in the data, and whether one that was saved means the same here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.data import hugging_face
from shardkit.data.sampler import COMPUTED, DRAWN_WHOLE, ORDERS

EPOCH_IS_OVER = "epoch is over"
"""Kept in place of a stream's own state after an epoch's last batch: datasets go back to their beginning there, so
their state would say that the epoch starts anew."""

REMEDIES = (
    "load_state_dict(state, restart_epoch=True) to start the epoch anew, or load_state(..., data_position=False) to "
    "leave the position out"
)


@dataclass(frozen=True)
class Position:
    """A place in the data, in samples of the whole run; `dataset` is its own state there, where it has one."""

    epoch: int = 0
    samples: int = 0
    dataset: Any = None
    order: str = COMPUTED


def saved_position(state: Mapping[str, Any]) -> Position:
    """The position in a loader's saved state. A new epoch is in this version's order, whatever version saved it."""
    if not state["samples_seen"]:
        return Position(int(state["epoch"]))
    return Position(int(state["epoch"]), int(state["samples_seen"]), state.get("dataset"), order_of(state))


def order_of(state: Mapping[str, Any]) -> str:
    """The order that the saved position counts in."""
    return state.get("order", DRAWN_WHOLE)


def facts_of(dataset: Any, length: int | None, split: tuple[int, int] | None) -> dict[str, Any]:
    """What a position in the data depends on, JSON-able."""
    return {
        "dataset_length": length if split is None else None,
        "split": None if split is None else split[1],
        "shuffle": hugging_face.shuffle_digest(dataset),
    }


def misfit(state: Mapping[str, Any], facts: Mapping[str, Any], saved_ranks: int | None) -> str | None:
    """Why a saved position means nothing for data with these facts, and what to do; None where it does.

    `saved_ranks` stands in where version 0.1 did not note over how many ranks a stream was split.
    """
    own, saved = facts["dataset_length"], state.get("dataset_length")
    if saved != own:
        return (
            f"the dataset has another length than when the position was saved (got {_count(own)}, saved "
            f"{_count(saved)}); use the same data, or {REMEDIES}"
        )
    if not state["samples_seen"] or state.get("dataset") == EPOCH_IS_OVER:
        return None  # an epoch starts on any number of ranks
    if order_of(state) not in ORDERS:
        return f"the position counts in an order that this version does not know (got {order_of(state)!r}); use a newer"
    own, saved = facts["split"], state.get("split", saved_ranks if facts["split"] else None)
    if saved != own:
        return (
            "the stream is not split by rank as it was when the position was saved, and a place in one part is none in "
            f"another (got {_split(own)}, saved {_split(saved)}); resume as it was saved, or {REMEDIES}"
        )
    if state.get("shuffle") not in (None, facts["shuffle"]):
        return (
            "the stream is shuffled in another order than when the position was saved (no seed?); give its "
            f"shuffle(seed=...) the number that it had, or {REMEDIES}"
        )
    return None


def _split(ranks: int | None) -> str:
    return "a whole stream" if ranks is None else f"{ranks} parts"


def _count(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"
