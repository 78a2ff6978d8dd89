"""Tensors that are one in the model and were saved as two: a load would drop the values of one of them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardkit.checkpoint.states.differences import Difference
from shardkit.checkpoint.states.fill import Saved
from shardkit.distributed.tensors import local_part


@dataclass(frozen=True)
class Tie:
    """Two names of one tensor of the model, and the different tensors of the checkpoint that have them."""

    section: str
    names: tuple[str, str]
    sources: tuple[str, str]
    tensor: torch.Tensor


def parted(ties: Iterable[Tie], saved: Saved) -> list[Difference]:
    """Those of which this rank's parts have different values. Reads both, one pair at a time."""
    found = []
    for tie in ties:
        if _are_equal(tie, saved):
            continue
        first, name = tie.names
        found.append(
            Difference(
                f"{tie.section}: {first} and {name} are one tensor in the model, but have different values in the "
                "checkpoint",
                f"build the model with both, or load with strict=False to take {first} for both",
            )
        )
    return found


def _are_equal(tie: Tie, saved: Saved) -> bool:
    entries = [saved.entry(tie.section, source) for source in tie.sources]
    if (entries[0].shape, entries[0].dtype) != (entries[1].shape, entries[1].dtype):
        return False
    one, other = (local_part(saved.new(tie.section, source, tie.tensor)) for source in tie.sources)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
