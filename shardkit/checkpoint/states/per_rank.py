"""Per-rank state: state that differs between ranks. Each rank saves and loads its own copy.

Ranks compare digests. If all are equal, there is no per-rank state. Otherwise the items that differ are moved out of
`common` and the index: every rank writes its values to `state/rank-*.json` ("apart"), and their tensors to `own/`.
`common` keeps a list of these items. Optimizer state of parameters is grouped by key, so that the messages between
ranks grow with the number of keys, not of parameters.

On the same number of ranks, each rank loads its own copy. On another number, objects and settings are loaded from
rank 0, with a warning; per-rank optimizer state of a part of a parameter cannot be used, and is an error.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk
from shardkit.checkpoint.files.state_json import ItemPlace, fqn_at, label_of
from shardkit.checkpoint.files.verify import Checkpoint
from shardkit.checkpoint.states import tensors
from shardkit.checkpoint.states.differences import Difference
from shardkit.checkpoint.states.state import Captured, Item, put
from shardkit.wording import first_few

# Larger tensors that should be equal on all ranks are compared by a sample of so many bytes.
SAMPLE_BYTES = 8 << 10


def of_items(captured: Captured) -> dict[str, str]:
    """{place as JSON: digest of all items at it, including their tensors}."""
    wanted = [
        (captured.tensors[item.section][name], SAMPLE_BYTES if item.is_replicated else None)
        for item in captured.items.values()
        for name in item.tensors
    ]
    data = iter(tensors.bytes_of(wanted))
    found: dict[str, digests.Digest] = {}
    for label, item in captured.items.items():
        digest = found.setdefault(_text(_place_of_all(item.at)), digests.new("xxh3"))
        entries = captured.index.sections[item.section]
        kinds = [(entries[name].dtype, entries[name].shape) for name in item.tensors]
        digest.update(memoryview(disk.to_json([label, item.value, kinds])))
        for _ in item.tensors:
            digest.update(tensors.memory(next(data)))
    return {places: digest.hexdigest() for places, digest in found.items()}


def of_tensors(named: Mapping[str, torch.Tensor], limit: int | None = None) -> dict[str, str]:
    """The digest of each tensor, by name; of a larger one than `limit` bytes only of a sample."""
    found = {}
    data = tensors.bytes_of([(tensor, limit) for tensor in named.values()])
    for label, part in zip(named, data, strict=True):
        digest = digests.new("xxh3")
        digest.update(tensors.memory(part))
        found[label] = digest.hexdigest()
    return found


def together(found: Mapping[str, str]) -> str:
    """One digest of many."""
    return digests.of_bytes("xxh3", disk.to_json(dict(found)))


def differing(of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """The labels whose digests are not equal on all ranks. `of_ranks`: {label: digest} of each rank."""
    labels = dict.fromkeys(label for one in of_ranks for label in one)
    return [label for label in labels if len({one.get(label) for one in of_ranks}) > 1]


def groups_among(places: Iterable[str]) -> list[str]:
    """The names of the param groups whose settings are at one of these places."""
    found = [disk.from_json(text.encode(), "apart") for text in places]
    return [label_of(at) for at in found if at[2:3] == ["groups"]]


def keep(captured: Captured, places: Iterable[str]) -> None:
    """Move the items at these places from the shared state to this rank's own."""
    chosen, own = [*places], []
    for label, item in [*captured.items.items()]:
        if _text(_place_of_all(item.at)) in chosen:
            own.append({"label": label, "at": list(item.at), "value": item.value})
            _take(captured.common, item.at)
            _move_tensors(captured, item)
            del captured.items[label]
    if chosen:
        captured.common["apart"] = [disk.from_json(text.encode(), "apart") for text in chosen]
        captured.own["apart"] = own


def _place_of_all(at: ItemPlace) -> ItemPlace:
    """The place of an item; for optimizer state of a parameter, one place for its key in all parameters."""
    return at if fqn_at(at) is None else [*at[:3], "*", *at[4:]]


def _text(place: ItemPlace) -> str:
    return disk.to_json(list(place)).decode()


def _take(tree: Any, at: ItemPlace) -> None:
    """Remove the value at a place; a group's settings become empty."""
    for key in at[:-1]:
        if isinstance(tree, dict) and key not in tree:
            return
        tree = tree[key]
    if at[-1] == "settings":
        tree["settings"] = {}
    else:
        tree.pop(at[-1], None)


def _move_tensors(captured: Captured, item: Item) -> None:
    for name in item.tensors:
        del captured.index.sections[item.section][name]
        captured.own_tensors[f"{item.section}:{name}"] = captured.tensors[item.section].pop(name)


# ---- loading ----


@dataclass
class Shared:
    """The state of common.json, completed with the per-rank state of this rank, or of rank 0."""

    common: dict[str, Any]
    own_rank: int | None = None
    """The rank whose file in `own/` has the tensors of the per-rank state; None without per-rank state."""
    differences: list[Difference] = field(default_factory=list)
    of_rank_0: list[str] = field(default_factory=list)
    """Labels of per-rank state that all ranks load from rank 0."""
    left_out: set[tuple[int, str]] = field(default_factory=set)
    """(number of the optimizer, fqn) of parameters whose optimizer state is not loaded."""


def shared(
    checkpoint: Checkpoint,
    common: dict[str, Any],
    own: Mapping[str, Any] | None,
    rank: int,
    is_laid_out_alike: Callable[[str], bool],
) -> Shared:
    """The state that this rank loads. `own`: its state/rank-*.json, None if the number of ranks changed.

    `is_laid_out_alike(fqn)`: whether this rank holds the same part of a parameter as when it was saved.
    """
    if "apart" not in common:
        return Shared(common)
    found = Shared(deepcopy(common), 0 if own is None else rank)
    source = checkpoint.of_rank(0) if own is None else own
    refused: dict[str, list[str]] = {}
    if own is None:  # rank 0 may not have items that other ranks had
        refused = {_text(place): [] for place in common["apart"] if not _is_of_no_part(place)}
    for item in source.get("apart", []):
        at, fqn = item["at"], fqn_at(item["at"])
        if own is not None and (fqn is None or is_laid_out_alike(fqn)):
            put(found.common, at, item["value"])
        elif _is_of_no_part(at):
            put(found.common, at, item["value"])
            found.of_rank_0.append(item["label"])
        else:
            refused.setdefault(_text(_place_of_all(at)), []).append(item["label"])
            if fqn is not None:
                found.left_out.add((at[1], fqn))
    why = "the number of ranks has changed" if own is None else "the sharding of its parameter has changed"
    world_size = checkpoint.manifest.world_size
    found.differences = [_refused(labels or [place], world_size, why) for place, labels in refused.items()]
    return found


def _is_of_no_part(at: ItemPlace) -> bool:
    """Whether the item does not depend on how a parameter is sharded: an object's state, or a group's settings."""
    return at[0] == "objects" or list(at[2:3]) == ["groups"]


def _refused(labels: list[str], world_size: int, why: str) -> Difference:
    return Difference(
        f"{first_few(labels, 5)}: each of the {world_size} ranks saved a different value, and {why}",
        f"load on {world_size} ranks with the same strategy, or with strict=False to reset the optimizer state of "
        "these parameters",
    )
