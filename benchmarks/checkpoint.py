"""Saving and loading a training state: shardkit beside torch's own ways, in turn, in one run.

    python -m benchmarks.checkpoint [--layers 80] [--ranks 2] [--repeats 5] [--output checkpoint.json]

The state is that of 1024 x 1024 layers with AdamW under FSDP2, on CPU ranks: 80 layers are 1 GB. One round before is
not counted. Peers: torch.distributed.checkpoint (DCP) for the sharded way, and for the full way a gather to rank 0 with
safetensors' save_file. accelerate's save_state is left out: it does not run FSDP on a CPU. Extra memory is rank 0's
anonymous memory at its peak, less what it was before. Compare ratios, not seconds.
"""

import argparse
import json
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardkit.checkpoint import control, read, write
from shardkit.checkpoint.snapshot import Background
from shardkit.checkpoint.state import Live

# What the project promises: ours to the peer's, by the median of seconds; and rank 0's extra memory in a save.
TARGETS = {
    "sharded save / DCP save": 1.25,
    "full save / gather to rank 0": 0.35,
    "sharded load / DCP load": 1.0,
    "stand-still of an async save / sharded save": 0.15,
}
MEMORY_TARGET_MIB = 64


def main() -> None:
    """Measure, print a table, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        arguments = (options.ranks, options.layers, options.repeats, Path(name), _free_port())
        multiprocessing.spawn(measure, arguments, nprocs=options.ranks)
        measured = json.loads((Path(name) / "result.json").read_text())
    result = summary(measured)
    _show(measured, result)
    if options.output:
        options.output.write_text(json.dumps({"measured": measured, **result}, indent=2) + "\n")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def measure(rank: int, ranks: int, layers: int, repeats: int, folder: Path, port: int) -> None:
    """One rank of the measurement; rank 0 leaves {what: [[seconds, extra MiB], ...]} in result.json."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    model, optimizer = _state(layers)
    actions = _actions(model, optimizer, folder)
    measured: dict[str, list[list[float]]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            if rank == 0 and name.endswith("save"):
                shutil.rmtree(folder / name, ignore_errors=True)
            value = _measured(action)
            if turn:
                measured[name].append(value)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _state(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(2, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _actions(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Callable[[], Any]]:
    live, agreed, beside = Live([model], [optimizer]), control.start(600), Background(control.start(600))

    def request(name: str) -> write.Request:
        return write.Request(folder / name, 1, "benchmark")

    def dcp_save() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / "DCP save"))

    def dcp_load() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=str(folder / "DCP save"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    def stand_still() -> float:
        started = time.perf_counter()
        beside.start(write.prepare(live, "sharded", request("async save"), agreed))
        seconds = time.perf_counter() - started
        beside.wait(agreed)
        return seconds

    return {
        "sharded save": lambda: write.save(live, "sharded", request("sharded save"), agreed),
        "DCP save": dcp_save,
        "full save": lambda: write.save(live, "full", request("full save"), agreed),
        "gather to rank 0 save": lambda: _gather_and_save(model, optimizer, folder / "gather to rank 0 save"),
        "sharded load": lambda: read.load(live, folder / "sharded save", agreed),
        "DCP load": dcp_load,
        "full load": lambda: read.load(live, folder / "full save", agreed),
        "async save": stand_still,
    }


def _gather_and_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    states: Any = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        flat = {f"{name}/{key}": value for name, row in states["state"].items() for key, value in row.items()}
        save_file(flat, folder / "optim.safetensors")


def _measured(action: Callable[[], Any]) -> list[float]:
    """Seconds until all ranks are done (or as the action itself says), and this rank's extra memory in MiB."""
    dist.barrier()
    before, peak, ended = _anonymous_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    own = action()
    dist.barrier()
    seconds = own if isinstance(own, float) else time.perf_counter() - started
    ended.set()
    watcher.join()
    return [seconds, max(0.0, peak[0] - before)]


def _anonymous_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def summary(measured: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Ratios of medians beside their targets, and the most extra memory of a save in MiB."""
    median = {name: statistics.median(seconds for seconds, _ in rounds) for name, rounds in measured.items()}
    ratios = {
        "sharded save / DCP save": median["sharded save"] / median["DCP save"],
        "full save / gather to rank 0": median["full save"] / median["gather to rank 0 save"],
        "sharded load / DCP load": median["sharded load"] / median["DCP load"],
        "stand-still of an async save / sharded save": median["async save"] / median["sharded save"],
    }
    extra = {name: statistics.median(mib for _, mib in measured[name]) for name in ("sharded save", "full save")}
    return {"ratios": ratios, "targets": TARGETS, "extra_mib": extra, "extra_mib_target": MEMORY_TARGET_MIB}


def _show(measured: dict[str, list[list[float]]], result: dict[str, Any]) -> None:
    for name, rounds in measured.items():
        seconds = [value for value, _ in rounds]
        extra = statistics.median(mib for _, mib in rounds)
        spread = f"({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"{name:<46}{statistics.median(seconds):7.2f} s   {spread:<18} rank 0: +{extra:.0f} MiB")
    for name, ratio in result["ratios"].items():
        print(f"{name:<46}{ratio:7.2f}     (target: at most {TARGETS[name]})")
    for name, mib in result["extra_mib"].items():
        print(f"{'extra memory of a ' + name:<46}{mib:7.0f} MiB (target: at most {MEMORY_TARGET_MIB})")


if __name__ == "__main__":
    main()
