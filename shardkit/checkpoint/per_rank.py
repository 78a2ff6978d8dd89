"""What ranks hold differently: each rank's own is saved beside what all share, and given back to it.

Ranks compare digests. Where all are equal, nothing is kept apart, and a checkpoint looks as it always did. Else the
items that differ leave `common` and the index, and every rank writes its own into `state/rank-*.json` ("apart") and,
of the tensors in it, into `own/`. `common` keeps a list of what there is. What an optimizer keeps of its parameters
goes together by key: a message grows with the number of keys, not of parameters.

On the same number of ranks each gets its own back. On another, objects and settings get rank 0's, with a warning;
what an optimizer keeps of a part of a parameter has no meaning there, and is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from shardkit.checkpoint import digest as digests
from shardkit.checkpoint import disk, tensors
from shardkit.checkpoint.state import Captured, Item, fqn_at, put
from shardkit.checkpoint.verify import Checkpoint

Place = Sequence[str | int]
# Tensors that every rank should hold alike, and that are larger, are compared by so many bytes of each.
SAMPLE_BYTES = 8 << 10


def of_items(captured: Captured) -> dict[str, str]:
    """A digest of all items at one place, tensors included; the place is written as JSON."""
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


def of_tensors(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The digest of each tensor, by name."""
    found = {}
    data = tensors.bytes_of([(tensor, None) for tensor in named.values()])
    for label, part in zip(named, data, strict=True):
        digest = digests.new("xxh3")
        digest.update(tensors.memory(part))
        found[label] = digest.hexdigest()
    return found


def together(found: Mapping[str, str]) -> str:
    """One digest of many."""
    return digests.of_bytes("xxh3", disk.to_json(dict(found)))


def differing(told: Sequence[Mapping[str, str]]) -> list[str]:
    """The labels that not all ranks have with the same digest."""
    labels = dict.fromkeys(label for one in told for label in one)
    return [label for label in labels if len({one.get(label) for one in told}) > 1]


def keep(captured: Captured, places: Iterable[str]) -> None:
    """Take the items at these places out of what all ranks share."""
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


def _place_of_all(at: Place) -> Place:
    """Where the item stands, or where what is kept of all parameters under its key does: such items go together."""
    return at if fqn_at(at) is None else [*at[:3], "*", *at[4:]]


def _text(place: Place) -> str:
    return disk.to_json(list(place)).decode()


def _take(tree: Any, at: Place) -> None:
    """Remove what stands at a place; a group's settings become empty."""
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
    """What common.json says to this rank: with what this rank had for itself, or rank 0."""

    common: dict[str, Any]
    own_rank: int | None = None
    """Whose file in `own/` holds the tensors of that; None: of no rank."""
    problems: list[str] = field(default_factory=list)
    of_rank_0: list[str] = field(default_factory=list)
    """What ranks had differently, and all get as rank 0 had it."""
    left_out: set[tuple[int, str]] = field(default_factory=set)
    """(number of the optimizer, fqn) of parameters whose state starts anew."""


def shared(
    checkpoint: Checkpoint,
    common: dict[str, Any],
    own: Mapping[str, Any] | None,
    rank: int,
    is_laid_out_alike: Callable[[str], bool],
    strict: bool,
) -> Shared:
    """The state that this rank is to have. `own`: its state/rank-*.json, None on another number of ranks.

    `is_laid_out_alike(fqn)` tells whether this rank holds the same part of a parameter as it did then.
    """
    if "apart" not in common:
        return Shared(common)
    found = Shared(deepcopy(common), 0 if own is None else rank)
    told = checkpoint.json("state/rank-00000.json") if own is None else own
    refused: dict[str, list[str]] = {}
    if own is None:  # rank 0 may have had none of what others had
        refused = {_text(place): [] for place in common["apart"] if not _is_of_no_part(place)}
    for item in told["apart"]:
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
    if strict:
        why = "the number of ranks is another now" if own is None else "it is laid out otherwise now"
        world_size = checkpoint.manifest.world_size
        found.problems = [_refusal(labels or [place], world_size, why) for place, labels in refused.items()]
    return found


def _is_of_no_part(at: Place) -> bool:
    """Whether the item says nothing of a part of a parameter: an object's state, or a group's settings."""
    return at[0] == "objects" or list(at[2:3]) == ["groups"]


def _refusal(labels: list[str], world_size: int, why: str) -> str:
    return (
        f"{labels_text(labels)}: each of the {world_size} ranks that saved it has its own, and {why}; load on "
        f"{world_size} ranks with the same strategy, or with strict=False to let the state of such parameters start "
        "anew"
    )


def labels_text(labels: Sequence[str]) -> str:
    """The first of many."""
    return ", ".join(labels[:5]) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")
