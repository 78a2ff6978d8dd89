"""index.json: the index of a checkpoint as JSON, and back."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardkit.checkpoint.files.layout import ITEM_BYTES, Index, Mesh, TensorEntry
from shardkit.errors import CheckpointCorrupted


def to_json(index: Index) -> dict[str, Any]:
    """The index as plain values."""
    return {
        "format": "shardkit-index",
        "version": 1,
        "kind": index.kind,
        "world_size": index.world_size,
        "meshes": [_mesh_to_json(mesh) for mesh in index.meshes],
        "sections": {
            section: {name: _entry_to_json(entry) for name, entry in entries.items()}
            for section, entries in index.sections.items()
        },
        "aliases": index.aliases,
    }


def _mesh_to_json(mesh: Mesh) -> dict[str, Any]:
    value: dict[str, Any] = {"shape": list(mesh.shape), "names": list(mesh.names)}
    if mesh.ranks is not None:
        value["ranks"] = list(mesh.ranks)
    return value


def _entry_to_json(entry: TensorEntry) -> dict[str, Any]:
    return {"dtype": entry.dtype, "shape": list(entry.shape), "mesh": entry.mesh, "placements": placements_of(entry)}


def placements_of(entry: TensorEntry) -> list[str]:
    """For each mesh axis, as in DTensor: S0 is sharded on dim 0, R is replicated."""
    return ["R" if dim is None else f"S{dim}" for dim in entry.placements]


def from_json(value: Any, where: str) -> Index:
    """The inverse of `to_json`. Raises CheckpointCorrupted on anything else."""
    try:
        return _from_json(value)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointCorrupted(f"{where}: not an index ({error!r}); the file is damaged.") from error


def _from_json(value: Any) -> Index:
    if value["format"] != "shardkit-index" or value["version"] != 1 or value["kind"] not in ("sharded", "full"):
        raise ValueError("unknown format")
    meshes = [_mesh_from_json(mesh) for mesh in value["meshes"]]
    sections = {
        section: {name: _entry_from_json(entry, meshes) for name, entry in entries.items()}
        for section, entries in value["sections"].items()
    }
    aliases = {section: {str(a): str(b) for a, b in names.items()} for section, names in value["aliases"].items()}
    if any(name not in sections[section] for section, names in aliases.items() for name in names.values()):
        raise ValueError("an alias of a tensor that does not exist")
    return Index(value["kind"], _whole(value["world_size"]), meshes, sections, aliases)


def _mesh_from_json(value: Mapping[str, Any]) -> Mesh:
    shape = tuple(_whole(size) for size in value["shape"])
    ranks = tuple(_whole(rank) for rank in value["ranks"]) if "ranks" in value else None
    if 0 in shape or (ranks is not None and (len(ranks) != prod(shape) or len(set(ranks)) != len(ranks))):
        raise ValueError("a mesh whose number of ranks does not match its shape, or with duplicate ranks")
    return Mesh(shape, ranks, tuple(str(name) for name in value["names"]))


def _entry_from_json(value: Mapping[str, Any], meshes: Sequence[Mesh]) -> TensorEntry:
    shape = tuple(_whole(size) for size in value["shape"])
    placements = tuple(None if item == "R" else _whole(int(item.removeprefix("S"))) for item in value["placements"])
    if value["dtype"] not in ITEM_BYTES or len(placements) != len(meshes[_whole(value["mesh"])].shape):
        raise ValueError("an unknown dtype, or placements that do not match the mesh")
    if any(dim is not None and dim >= len(shape) for dim in placements):
        raise ValueError("a placement on a dim that does not exist")
    return TensorEntry(shape, value["dtype"], value["mesh"], placements)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a non-negative integer, got {value!r}")
    return value
