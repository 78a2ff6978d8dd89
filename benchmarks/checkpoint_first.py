"""The first load of a training state in a fresh process: seconds, and memory beyond what the state itself takes.

    python -m benchmarks.checkpoint_first [--layers 240] [--ranks 2] [--rounds 5] [--output first.json]

The state is that of 1024 x 1024 layers with AdamW, on CPU ranks: 240 layers are 3 GB. Every measurement has ranks of
its own, whose model has its memory and whose optimizer has no state yet; files are in the system's cache for all.

sharded   FSDP2: shardkit beside torch.distributed.checkpoint (DCP)
full      every rank holds all of it: shardkit beside torch.load and load_state_dict, as they are by default, and with
          mmap=True, which leaves the optimizer's state in the file until the first step; with that step, too. "Bare
          read" only brings as many bytes into the weights and into new memory: no format, no check

Extra memory is rank 0's anonymous memory at its peak, less what it was before and less the optimizer's state.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import interleaved
from benchmarks.checkpoint import WIDTH, Compared, group, peak_of, run, summary
from shardkit.checkpoint.loading import read
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.states.state import Live
from shardkit.distributed import control

COMPARED: dict[str, Compared] = {
    "sharded": [("shardkit load", "DCP load", 1.2)],
    "full": [
        ("shardkit load", "torch.load load", None),
        ("shardkit load", "bare read load", None),
        ("shardkit load", "mmap load", 4.0),
        ("bare read load", "mmap load", None),
        ("shardkit load and step", "mmap load and step", None),
    ],
}
EXTRA_MEMORY_MIB = 256


def main() -> None:
    """Measure, print tables, write JSON where it is asked for."""
    run(__doc__, list(COMPARED), 240, measure)


def measure(family: str, ranks: int, layers: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Saves once, then loads in turn; what the JSON holds of one family."""
    _in_fresh_ranks(save_all, ranks, family, layers, folder)
    extra_mib: dict[str, list[float]] = {}

    def timed(name: str) -> float:
        _read_all(folder)
        _in_fresh_ranks(load_one, ranks, family, layers, folder, name)
        found = json.loads((folder / "result.json").read_text())
        extra_mib.setdefault(name, []).append(found["extra_mib"])
        return float(found["wall_s"])

    names = dict.fromkeys(name for pair in COMPARED[family] for name in pair[:2])
    wall_s = interleaved.measure({name: partial(timed, name) for name in names}, rounds)
    most = {name: max(values) for name, values in extra_mib.items()}
    return summary(COMPARED[family], wall_s, most, EXTRA_MEMORY_MIB)


def _in_fresh_ranks(function: Callable[..., None], ranks: int, *arguments: Any) -> None:
    multiprocessing.spawn(_rank, (ranks, interleaved.free_port(), function, arguments), nprocs=ranks)


def _rank(rank: int, ranks: int, port: int, function: Callable[..., None], arguments: Any) -> None:
    torch.set_num_threads(1)
    with group(rank, ranks, port):
        function(*arguments)


def _read_all(folder: Path) -> None:
    """Brings every file into the system's cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass


def built(family: str, layers: int, value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model with its memory, every weight of one value, and an optimizer without state."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    if family == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def save_all(family: str, layers: int, folder: Path) -> None:
    """One checkpoint of each contestant. Collective."""
    model, optimizer = built(family, layers, 0.01)
    _step(model, optimizer)
    request = write.SaveRequest(folder / "shardkit", 1, "benchmark")
    write.save(Live([model], [optimizer]), "sharded" if family == "sharded" else "full", request, control.start(600))
    if family == "sharded":
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": state}, checkpoint_id=str(folder / "DCP"))
    elif dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "state.pt")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.zeros(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_one(family: str, layers: int, folder: Path, name: str) -> None:
    """One measured load; rank 0 leaves result.json. Collective."""
    model, optimizer = built(family, layers, 0.5)
    load = LOADS[name.split()[0]]
    act = partial(load, model, optimizer, folder)
    if name.endswith("step"):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        act = partial(_and_step, act, optimizer)
    dist.barrier()
    began = time.perf_counter()
    extra_mib = peak_of(act)
    dist.barrier()
    seconds = time.perf_counter() - began
    expected = sum(p.numel() * p.element_size() for p in map(_local, model.parameters())) * 2 / 2**20
    if dist.get_rank() == 0:
        found = {"wall_s": seconds, "extra_mib": max(0.0, extra_mib - expected)}
        (folder / "result.json").write_text(json.dumps(found))


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _and_step(load: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    load()
    optimizer.step()


def _load_ours(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    read.load(Live([model], [optimizer]), folder / "shardkit", control.start(600), read.LoadOptions())


def _load_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=str(folder / "DCP"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def _load_mapped(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    _load_torch(model, optimizer, folder, mmap=True)


def _load_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, mmap: bool = False) -> None:
    found = torch.load(folder / "state.pt", mmap=mmap, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optim"])


def _load_bare(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    at = 0
    with (folder / "state.pt").open("rb", buffering=0) as file, torch.no_grad():
        for parameter in model.parameters():
            state = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = state
            for tensor in (parameter.detach(), *state.values()):
                at += os.preadv(file.fileno(), [tensor.numpy().reshape(-1)], at)


LOADS = {"shardkit": _load_ours, "DCP": _load_dcp, "torch.load": _load_torch, "mmap": _load_mapped, "bare": _load_bare}


if __name__ == "__main__":
    main()
