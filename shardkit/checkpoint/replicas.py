"""Tensors that every rank holds whole: buffers, and the weights under DistributedDataParallel. Where they differ
between ranks, rank 0's are saved, never a mix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.tensor import DTensor

from shardkit.checkpoint import per_rank
from shardkit.checkpoint.layout import Index, Mesh
from shardkit.checkpoint.state import Captured

RANK_0 = Mesh((1,))


@dataclass
class Drift:
    """Names of what differs between ranks, although one process would have one of it."""

    buffers: list[str] = field(default_factory=list)
    """Those of the buffers that were compared."""
    weights: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    """Param groups of optimizers, whose settings each rank saves as its own."""


def of_whole(tensors: Mapping[str, torch.Tensor], limit: int | None = None) -> dict[str, str]:
    """{name: digest} of the tensors that are held whole; of one larger than `limit` bytes only of a sample."""
    return per_rank.of_tensors({name: one for name, one in tensors.items() if not isinstance(one, DTensor)}, limit)


def of_captured(captured: Captured) -> dict[str, dict[str, str]]:
    """{section: {name: digest}} of the weights; of large ones only of a sample."""
    return {section: of_whole(weights, per_rank.SAMPLE_BYTES) for section, weights in captured.weights.items()}


def differing(of_ranks: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, list[str]]:
    """{section: names of the weights that differ}. `of_ranks`: `of_captured` of each rank."""
    found = {section: per_rank.differing([one.get(section, {}) for one in of_ranks]) for section in of_ranks[0]}
    return {section: names for section, names in found.items() if names}


def names_of(differing: Mapping[str, Sequence[str]]) -> list[str]:
    """`<section>: <name>` of each tensor."""
    return [f"{section}: {name}" for section, names in differing.items() for name in names]


def leave_to_rank_0(index: Index, differing: Mapping[str, Sequence[str]]) -> None:
    """Lets rank 0 write these tensors alone."""
    alone = index.mesh_number(RANK_0)
    for section, names in differing.items():
        for name in names:
            entry = index.sections[section][name]
            index.sections[section][name] = replace(entry, mesh=alone, placements=(None,))
