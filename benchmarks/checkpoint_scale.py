"""What planning a checkpoint costs at any number of ranks: the tensors of a 70B model with Adam, no memory behind them.

    python -m benchmarks.checkpoint_scale [--ranks 2 64 1024 4096] [--dcp-ranks 2 64 1024] [--output scale.json]

Every number of ranks is a process of its own, which stands for the middle rank of a fake process group. Of shardkit it
measures what a rank does before it writes, the size of index and manifest, and what a rank does before it reads when
another number of ranks has saved. Of torch.distributed.checkpoint (DCP) it measures what rank 0 does with the plans of
all ranks, which it gathers; their transfer is not counted, only their size.
"""

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import interleaved
from shardkit.checkpoint.files import disk, index_json, layout, manifest
from shardkit.checkpoint.files.layout import Index
from shardkit.checkpoint.files.manifest import File, Manifest
from shardkit.checkpoint.saving import opening
from shardkit.checkpoint.states import per_rank, state, tensors
from shardkit.checkpoint.states.state import Live
from shardkit.dims import part_of_dim

RANKS = (2, 64, 1024, 4096)
# DCP at 4,096 ranks would need about 17 GiB and two minutes.
DCP_RANKS = (2, 64, 1024)
# What the project promises.
PLANNING_S, READING_S, RECORDS_MB = 1.0, 2.0, 5.0


def main() -> None:
    """Measure, print a table, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--dcp-ranks", type=int, nargs="*", default=DCP_RANKS)
    parser.add_argument("--blocks", type=int, default=80, help="transformer blocks; 80 are a 70B model")
    parser.add_argument("--output", type=interleaved.writable)
    parser.add_argument("--one", choices=["shardkit", "dcp"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measured = {"shardkit": measure_shardkit, "dcp": measure_dcp}[options.one](options.ranks[0], options.blocks)
        print(json.dumps(measured))
        return
    result: dict[str, Any] = {**interleaved.surroundings(), "blocks": options.blocks}
    result["shardkit"] = {ranks: _in_a_process("shardkit", ranks, options.blocks) for ranks in options.ranks}
    result["dcp"] = {ranks: _in_a_process("dcp", ranks, options.blocks) for ranks in options.dcp_ranks}
    _show(result)
    if options.output:
        interleaved.write(options.output, result)


def _in_a_process(one: str, ranks: int, blocks: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.checkpoint_scale", "--one", one]
    command += ["--ranks", str(ranks), "--blocks", str(blocks)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"checkpoint_scale: {one} with {ranks} ranks failed\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _show(result: dict[str, Any]) -> None:
    print("ranks   a rank plans its save   index + manifest   a rank plans its load (saved by 64; by 4,096)   peak")
    for ranks, one in result["shardkit"].items():
        loads = "; ".join(f"{seconds:.2f} s" for seconds in one["load_s"].values())
        print(f"{ranks:>5}   {one['save_s']:.2f} s   {one['records_mb']:.2f} MB   {loads}   {one['peak_gib']:.2f} GiB")
    print(f"targets: at most {PLANNING_S} s, {RECORDS_MB} MB, {READING_S} s")
    print("ranks   DCP: a rank plans   rank 0 plans for all   plans it gathers   metadata   peak")
    for ranks, one in result["dcp"].items():
        sizes = f"{one['plans_mb']:.1f} MB   {one['metadata_mb']:.1f} MB   {one['peak_gib']:.2f} GiB"
        print(f"{ranks:>5}   {one['local_s']:.2f} s   {one['global_s']:.2f} s   {sizes}")


def shapes(blocks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of Llama 3 70B (https://arxiv.org/abs/2407.21783, table 3) with so many blocks."""
    hidden, inner, keys, vocab = 8192, 28672, 1024, 128256
    yield "embed_tokens", (vocab, hidden)
    for block in range(blocks):
        for name, rows in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys), ("o_proj", hidden)):
            yield f"layers_{block}_{name}", (rows, hidden)
        for name in ("gate_proj", "up_proj"):
            yield f"layers_{block}_{name}", (inner, hidden)
        yield f"layers_{block}_down_proj", (hidden, inner)
        for name in ("input_norm", "attention_norm"):
            yield f"layers_{block}_{name}", (hidden,)
    yield "norm", (hidden,)
    yield "lm_head", (vocab, hidden)


def live_of(ranks: int, blocks: int) -> Live:
    """The model and its AdamW as one rank holds them, sharded on dim 0. Begins the fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch keeps it there

    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))

    def sharded(shape: tuple[int, ...]) -> DTensor:
        _, size = part_of_dim(shape[0], ranks, ranks // 2)
        own = torch.empty(1).expand(size, *shape[1:])  # one value: a save refuses the meta device
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    model = nn.ParameterDict({name: nn.Parameter(sharded(shape)) for name, shape in shapes(blocks)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        moments = {key: sharded(tuple(parameter.shape)) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return Live([model], [optimizer])


def measure_shardkit(ranks: int, blocks: int) -> dict[str, Any]:
    """What one rank does before it writes and before it reads, and what is stored beside the tensors."""
    live, rank = live_of(ranks, blocks), ranks // 2
    began = time.perf_counter()
    captured = state.capture(live, "sharded", rank, ranks)
    for section in captured.index.sections:
        tensors.pieces_to_write(captured.index, section, captured.tensors[section], rank)
    opening.fingerprints(captured)
    per_rank.of_items(captured)
    seconds = time.perf_counter() - began
    records = len(disk.to_json_in_order(index_json.to_json(captured.index))) + len(_manifest(captured.index))
    return {
        "tensors": sum(map(len, captured.index.sections.values())),
        "save_s": seconds,
        "records_mb": records / 1e6,
        "load_s": {saved: _plan_a_load(captured.index, saved, rank) for saved in (64, 4096)},
        "peak_gib": _peak_gib(),
    }


def _manifest(index: Index) -> bytes:
    """As long as that of a checkpoint by these ranks: every one writes three files."""
    files = {f"state/rank-{rank:05d}.json": File(9_000, {rank: "0" * 32}) for rank in range(index.world_size)}
    for section in ("model", "optim"):
        for rank in range(index.world_size):
            files[layout.file_of(index, section, rank)] = File(10**9, {rank: "0" * 32})
    text = dict.fromkeys(("save_id", "run_id", "created_utc", "config_sha256", "model_fingerprint"), "0" * 64)
    numbers = {"step": 0, "epoch": 0, "samples_seen": 0, "world_size": index.world_size}
    record = Manifest(
        **text,
        **numbers,
        kind="sharded",
        parent=None,
        mesh={"names": ["shard"], "shape": [index.world_size]},
        versions={},
        sections=list(index.sections),
        digest="xxh3",
        files=files,
    )
    return manifest.to_bytes(record)


def _plan_a_load(now: Index, saved: int, rank: int) -> float:
    """Seconds until a rank knows which saved pieces overlap what it holds: read the index, look at every tensor."""
    then = Index("sharded", saved, [replace(mesh, shape=(saved,)) if mesh.size > 1 else mesh for mesh in now.meshes])
    then.sections = now.sections
    text = disk.to_json_in_order(index_json.to_json(then))
    began = time.perf_counter()
    index = index_json.from_json(disk.from_json(text, "index.json"), "index.json")
    found = 0
    for section, entries in now.sections.items():
        for name, entry in entries.items():
            mesh = now.meshes[entry.mesh]
            box = layout.local_box(entry, mesh, mesh.coordinate(rank) or (0,) * len(mesh.shape))
            found += sum(1 for _ in layout.pieces(index, section, name, box))
    assert found
    return time.perf_counter() - began


def measure_dcp(ranks: int, blocks: int) -> dict[str, Any]:
    """What DCP's default planner does on one rank, and on rank 0 with the plans of all."""
    live = live_of(ranks, blocks)
    weights = {f"model.{name}": tensor for name, tensor in state.model_tensors(live.models[0]).items()}
    names = state.parameter_names(live.models)
    for parameter, row in live.optimizers[0].state.items():
        weights.update({f"optim.{names[id(parameter)]}.{key}": value for key, value in row.items() if value.ndim})
    planner = DefaultSavePlanner()
    planner.set_up_planner(weights, is_coordinator=True)
    began = time.perf_counter()
    mine = planner.create_local_plan()
    local_s = time.perf_counter() - began
    plans = [replace(mine, items=[_of_rank(item, ranks, rank) for item in mine.items]) for rank in range(ranks)]
    plans_mb = len(pickle.dumps(mine)) * ranks / 1e6
    began = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    global_s = time.perf_counter() - began
    sizes = {"plans_mb": plans_mb, "metadata_mb": len(pickle.dumps(metadata)) / 1e6, "peak_gib": _peak_gib()}
    return {"local_s": local_s, "global_s": global_s, **sizes}


def _of_rank(item: WriteItem, ranks: int, rank: int) -> WriteItem:
    """The item as another rank plans it."""
    assert item.tensor_data is not None
    begin, size = part_of_dim(item.tensor_data.size[0], ranks, rank)
    rest = item.tensor_data.chunk.offsets[1:]
    offsets, sizes = torch.Size((begin, *rest)), torch.Size((size, *item.tensor_data.size[1:]))
    chunk = ChunkStorageMetadata(offsets, sizes)
    return replace(
        item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=replace(item.tensor_data, chunk=chunk)
    )


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
