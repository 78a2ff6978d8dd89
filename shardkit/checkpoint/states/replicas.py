"""Tensors of which several ranks hold the same part: buffers, the weights under DistributedDataParallel, and the shards
of hybrid strategies. Where they differ between ranks, those of rank 0's replica are saved, never a mix."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardkit.checkpoint.files.layout import Index, Mesh, unravel
from shardkit.checkpoint.states import per_rank
from shardkit.checkpoint.states.state import Captured
from shardkit.checkpoint.states.tensors import mesh_of
from shardkit.distributed.tensors import local_part

RANK_0 = Mesh((1,))


@dataclass
class Drift:
    """Names of what differs between ranks, although one process would have one of it."""

    buffers: list[str] = field(default_factory=list)
    """Those of the buffers that were compared."""
    weights: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    """Param groups of optimizers, whose settings each rank saves as its own."""


def of_whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """{name: digest} of the tensors that are held whole."""
    return per_rank.of_tensors({name: one for name, one in tensors.items() if not isinstance(one, DTensor)})


@dataclass(frozen=True)
class Copies:
    """Digests of what other ranks hold as well; of large tensors only of a sample."""

    of: dict[str, dict[str, list[Any]]]
    """{section: {name: [the first rank that holds the same part of the tensor, digest]}}"""

    def by_first_rank(self) -> dict[str, str]:
        """{rank: one digest of all whose first rank it is}: short, for the first comparison."""
        found: dict[str, dict[str, str]] = {}
        for section, parts in self.of.items():
            for name, (first, digest) in parts.items():
                found.setdefault(str(first), {})[f"{section}: {name}"] = digest
        return {first: per_rank.together(digests) for first, digests in found.items()}


def copies_of(sections: Mapping[str, Mapping[str, torch.Tensor]]) -> Copies:
    """The digests of {section: {name: tensor}}. Tensors of which no rank has the same part as this one are left out."""
    found: dict[str, dict[str, list[Any]]] = {}
    for section, held in sections.items():
        first = {name: rank for name, one in held.items() if (rank := _first_rank(one)) is not None}
        parts = {name: local_part(held[name]) for name in first}
        digests = per_rank.of_tensors(parts, per_rank.SAMPLE_BYTES)
        found[section] = {name: [first[name], digest] for name, digest in digests.items()}
    return Copies(found)


def copies_in(captured: Captured) -> Copies:
    """The digests of the weights, and of the optimizer state that hybrid strategies shard within each replica."""
    spread: dict[str, dict[str, torch.Tensor]] = {
        section: {name: one for name, one in held.items() if isinstance(one, DTensor)}
        for section, held in captured.tensors.items()
        if section not in captured.weights
    }
    return copies_of(captured.weights | spread)


def _first_rank(tensor: torch.Tensor) -> int | None:
    """The first rank that holds the same part of a tensor as this rank; None if no other rank does."""
    if not isinstance(tensor, DTensor):
        return 0
    here, coordinate = mesh_of(tensor.device_mesh), tensor.device_mesh.get_coordinate()
    is_copied = [one.is_replicate() for one in tensor.placements]
    if coordinate is None or prod(size for size, copied in zip(here.shape, is_copied, strict=True) if copied) == 1:
        return None
    return here.rank_at([0 if copied else n for n, copied in zip(coordinate, is_copied, strict=True)])


def are_alike(of_ranks: Iterable[Mapping[str, str]]) -> bool:
    """Whether ranks that hold the same parts have the same values in them. `of_ranks`: `by_first_rank` of each."""
    found: dict[str, str] = {}
    return all(found.setdefault(first, digest) == digest for one in of_ranks for first, digest in one.items())


def differing(of_ranks: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]) -> dict[str, list[str]]:
    """{section: names of the tensors that differ}. `of_ranks`: `Copies.of` of each rank."""
    seen: dict[tuple[str, str, int], str] = {}
    found: dict[str, dict[str, None]] = {}
    for one in of_ranks:
        for section, parts in one.items():
            for name, (first, digest) in parts.items():
                if seen.setdefault((section, name, first), digest) != digest:
                    found.setdefault(section, {})[name] = None
    return {section: [*names] for section, names in found.items()}


def names_of(differing: Mapping[str, Sequence[str]]) -> list[str]:
    """`<section>: <name>` of each tensor."""
    return [f"{section}: {name}" for section, names in differing.items() for name in names]


def leave_to_first(index: Index, differing: Mapping[str, Sequence[str]]) -> None:
    """Lets the first replica write these tensors alone: rank 0, and the ranks that hold the other parts of them."""
    for section, names in differing.items():
        for name in names:
            entry = index.sections[section][name]
            mesh, placements = _first_replica(index.meshes[entry.mesh], entry.placements)
            index.sections[section][name] = replace(entry, mesh=index.mesh_number(mesh), placements=placements)


def _first_replica(mesh: Mesh, placements: Sequence[int | None]) -> tuple[Mesh, tuple[int | None, ...]]:
    kept = [axis for axis, dim in enumerate(placements) if dim is not None]
    if not kept:
        return Mesh((1,), None if mesh.ranks is None else mesh.ranks[:1]), (None,)
    shape = tuple(mesh.shape[axis] for axis in kept)
    ranks = []
    for position in range(prod(shape)):
        coordinate = [0] * len(mesh.shape)
        for axis, number in zip(kept, unravel(position, shape), strict=True):
            coordinate[axis] = number
        ranks.append(mesh.rank_at(coordinate))
    is_plain = ranks == [*range(len(ranks))]
    return Mesh(shape, None if is_plain else tuple(ranks)), tuple(placements[axis] for axis in kept)
