"""Saving and loading a training state: shardkit beside torch's own ways and accelerate's, in turn, in one run.

    python -m benchmarks.checkpoint [--layers 80] [--ranks 2] [--rounds 5] [--family fsdp] [--output checkpoint.json]

The state is that of 1024 x 1024 layers with AdamW, on CPU ranks: 80 layers are 1 GB. One round before is not counted.
Under FSDP2 the peers are torch.distributed.checkpoint (DCP), and for one whole file a gather to rank 0 written by
safetensors; under DDP it is accelerate, which runs no FSDP on a CPU. Of an async save counts what the loop waits: for
the call, and in the optimizer step after a forward and backward.
Extra memory is rank 0's anonymous memory at its peak, less what it was before.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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

from benchmarks import interleaved
from benchmarks.contestants import Unavailable, accelerate_here
from shardkit.checkpoint.files.layout import Kind
from shardkit.checkpoint.loading import read
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.saving.async_save import AsyncSave
from shardkit.checkpoint.states.state import Live
from shardkit.distributed import control
from shardkit.distributed.control import ControlGroup

Actions = dict[str, Callable[[], Any]]
Compared = list[tuple[str, str, float | None]]
"""Of a family: ours, the other, and what the project promises of the ratio (None: nothing)."""

COMPARED: dict[str, Compared] = {
    "fsdp": [
        ("sharded save", "DCP save", 1.25),
        ("full save", "gather to rank 0 save", 0.35),
        ("sharded load", "DCP load", 1.0),
        ("async save", "sharded save", 0.15),
    ],
    "ddp": [
        ("shardkit save", "accelerate save", None),
        ("shardkit load", "accelerate load", None),
        ("async save", "shardkit save", 0.15),
    ],
}
WIDTH = 1024
# Saves that must not take memory of their own, and how much they may.
LEAN = ("sharded save", "full save", "shardkit save")
EXTRA_MEMORY_MIB = 64


def main() -> None:
    """Measure, print tables, write JSON where it is asked for."""
    run(__doc__, list(COMPARED), 80, measure)


def run(doc: str, families: list[str], layers: int, measured: Callable[..., dict[str, Any]]) -> None:
    """A benchmark of checkpoints, with so many layers by default. `measured(family, ranks, layers, rounds, folder)` is
    what the JSON holds of one family."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--family", action="append", choices=families, help="repeatable; by default all")
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary folder")
    parser.add_argument("--output", type=interleaved.writable)
    options = parser.parse_args()
    result = {**interleaved.surroundings(), "ranks": options.ranks, "layers": options.layers}
    for family in options.family or families:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            result[family] = measured(family, options.ranks, options.layers, options.rounds, Path(name))
        _show(family, result[family])
    if options.output:
        interleaved.write(options.output, result)


def _show(family: str, found: dict[str, Any]) -> None:
    ratios = [interleaved.Ratio(**one) for one in found["ratios"]]
    print(f"{family.upper()}\n{interleaved.table(found['rounds'], ratios, 's')}")
    print(f"  targets: {', '.join(f'{pair} at most {target}' for pair, target in found['targets'].items())}")
    for name, mib in found["extra_mib"].items():
        print(f"  extra memory of rank 0, {name}: {mib:.0f} MiB (target of ours: at most {found['extra_mib_target']})")
    for name, reason in found.get("left_out", {}).items():
        print(f"  {name}: left out; {reason}")


def summary(
    compared: Compared, wall_s: dict[str, list[float]], extra_mib: dict[str, float], most: int
) -> dict[str, Any]:
    """What the JSON holds of one family; `most`: extra MiB that ours may take."""
    ratios = [interleaved.ratio(wall_s, ours, other) for ours, other, _ in compared if other in wall_s]
    return {
        **interleaved.summary(wall_s, ratios),
        "targets": {f"{ours} / {other}": target for ours, other, target in compared if target is not None},
        "extra_mib": extra_mib,
        "extra_mib_target": most,
    }


@contextmanager
def group(rank: int, ranks: int, port: int) -> Iterator[None]:
    """Inside, this process is a rank of a process group. Collective."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def measure(family: str, ranks: int, layers: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Saves and loads in turn, all in the same ranks; what the JSON holds of one family."""
    arguments = (family, ranks, layers, rounds, folder, interleaved.free_port())
    multiprocessing.spawn(_rank, arguments, nprocs=ranks)
    found = json.loads((folder / "result.json").read_text())
    lean = {name: statistics.median(found["extra_mib"][name]) for name in LEAN if name in found["extra_mib"]}
    return {**summary(COMPARED[family], found["wall_s"], lean, EXTRA_MEMORY_MIB), "left_out": found["left_out"]}


def _rank(rank: int, family: str, ranks: int, layers: int, rounds: int, folder: Path, port: int) -> None:
    """One rank of the measurement; rank 0 leaves seconds and extra MiB, by what was done and round, in result.json."""
    with group(rank, ranks, port):
        actions, left_out = {"fsdp": fsdp_actions, "ddp": ddp_actions}[family](layers, folder)
        torch.set_num_threads(1)  # accelerate chooses for the whole process
        extra_mib: dict[str, list[float]] = {name: [] for name in actions}
        timed = {name: partial(_timed, name, act, folder, extra_mib[name]) for name, act in actions.items()}
        for action in timed.values():  # once before, saves ahead of loads: buffers, file caches
            action()
        wall_s = interleaved.measure(timed, rounds)
        if rank == 0:
            found = {"wall_s": wall_s, "extra_mib": extra_mib, "left_out": left_out}
            (folder / "result.json").write_text(json.dumps(found))


def _model(layers: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp_actions(layers: int, folder: Path) -> tuple[Actions, dict[str, str]]:
    """Saves and loads of a sharded state, and who is left out, with reasons. Collective."""
    model = _model(layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer)
    live, agreed = Live([model], [optimizer]), control.start(600)

    def dcp_save() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / "DCP save"))

    def dcp_load() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": state}, checkpoint_id=str(folder / "DCP save"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    actions: Actions = {
        "sharded save": lambda: _save(live, "sharded", folder / "sharded save", agreed),
        "DCP save": dcp_save,
        "full save": lambda: _save(live, "full", folder / "full save", agreed),
        "gather to rank 0 save": lambda: _gather_and_save(model, optimizer, folder / "gather to rank 0 save"),
        "sharded load": lambda: _load(live, folder / "sharded save", agreed),
        "DCP load": dcp_load,
        "full load": lambda: _load(live, folder / "full save", agreed),
        "async save": _async_save(live, folder / "async save", agreed),
    }
    return actions, {"accelerate": "it has no FSDP on a CPU"}


def ddp_actions(layers: int, folder: Path) -> tuple[Actions, dict[str, str]]:
    """Saves and loads of a state that every rank has whole, and who is left out, with reasons. Collective."""
    try:
        peer = accelerate_here(cpu=True)
    except Unavailable as reason:
        model = nn.parallel.DistributedDataParallel(_model(layers))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        theirs: Actions = {}
        left_out = {"accelerate": str(reason)}
    else:
        model = _model(layers)
        model, prepared = peer.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        optimizer, left_out = prepared.optimizer, {}
        theirs = {
            "accelerate save": lambda: peer.save_state(str(folder / "accelerate save")),
            "accelerate load": lambda: peer.load_state(str(folder / "accelerate save")),
        }
    _step(model, optimizer)
    live, agreed = Live([model], [optimizer]), control.start(600)
    ours: Actions = {
        "shardkit save": lambda: _save(live, "sharded", folder / "shardkit save", agreed),
        "shardkit load": lambda: _load(live, folder / "shardkit save", agreed),
        "async save": _async_save(live, folder / "async save", agreed),
    }
    return {**ours, **theirs}, left_out


def _save(live: Live, kind: Kind, final: Path, agreed: ControlGroup) -> None:
    write.save(live, kind, write.SaveRequest(final, 1, "benchmark"), agreed)


def _load(live: Live, saved: Path, agreed: ControlGroup) -> None:
    read.load(live, saved, agreed, read.LoadOptions())


def _async_save(live: Live, final: Path, agreed: ControlGroup) -> Callable[[], float]:
    beside = AsyncSave(control.start_background(600))

    def stand_still() -> float:
        """Until save_state would return, and what the next optimizer step still waits for."""
        began = time.perf_counter()
        beside.start(write.prepare(live, "sharded", write.SaveRequest(final, 1, "benchmark"), agreed), live.optimizers)
        seconds = time.perf_counter() - began
        live.models[0](torch.randn(2, WIDTH)).sum().backward()
        began = time.perf_counter()
        beside.wait_until_copied()
        seconds += time.perf_counter() - began
        live.optimizers[0].zero_grad()
        beside.wait(agreed)
        return seconds

    return stand_still


def _gather_and_save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    states: Any = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        flat = {f"{name}/{key}": value for name, row in states["state"].items() for key, value in row.items()}
        save_file(flat, folder / "optim.safetensors")


def _timed(name: str, action: Callable[[], Any], folder: Path, extra_mib: list[float]) -> float:
    """Seconds until all ranks are done, or the float that the action returns; appends this rank's extra MiB."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder / name, ignore_errors=True)
        os.sync()  # what the one before left for the system to write is not this one's to wait for
    dist.barrier()
    own: list[Any] = []
    started = time.perf_counter()
    extra = peak_of(lambda: own.append(action()))
    dist.barrier()
    seconds = own[0] if isinstance(own[0], float) else time.perf_counter() - started
    extra_mib.append(extra)
    return seconds


def peak_of(action: Callable[[], Any]) -> float:
    """How many MiB of anonymous memory this process had more at its peak than before the action."""
    before, peak, ended = _anonymous_mib(), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            peak[0] = max(peak[0], _anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    peak[0] = max(peak[0], _anonymous_mib())
    ended.set()
    watcher.join()
    return max(0.0, peak[0] - before)


def _anonymous_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
