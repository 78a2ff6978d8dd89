"""What a checkpoint consists of, for `shardkit checkpoint inspect`."""

from typing import Any

from shardkit.checkpoint.files.index_json import placements_of
from shardkit.checkpoint.files.verify import Checkpoint


def facts(found: Checkpoint) -> dict[str, Any]:
    """What a checkpoint is and holds, as JSON values: step, ranks, versions, sizes by section."""
    record = found.manifest
    names = ("kind", "step", "epoch", "samples_seen", "world_size", "mesh", "created_utc", "save_id", "run_id", "nan")
    known = {"path": str(found.path), **{name: getattr(record, name) for name in (*names, "parent", "digest")}}
    known |= {"versions": record.versions, "bytes": record.bytes, "files": len(record.every_file)}
    known["sections"] = {
        section: {
            "tensors": len(entries),
            "bytes": sum(entry.bytes for entry in entries.values()),
            "elements": sum(entry.whole.count for entry in entries.values()),
            "dtypes": sorted({entry.dtype for entry in entries.values()}),
            "tied": found.index.aliases.get(section, {}),
        }
        for section, entries in found.index.sections.items()
    }
    if found.apart:
        own = [file.bytes for name, file in record.files.items() if name.startswith("own/")]
        known["own"] = {"of": found.apart, "files": len(own), "bytes": sum(own)}
    return known


def tensors(found: Checkpoint) -> dict[str, dict[str, Any]]:
    """Every tensor by section and name: dtype, shape and `index_json.placements_of`."""
    return {
        section: {
            name: {"dtype": entry.dtype, "shape": list(entry.shape), "placements": placements_of(entry)}
            for name, entry in entries.items()
        }
        for section, entries in found.index.sections.items()
    }
