"""Scripts that set torch's default device: what shardkit makes for itself is in host memory all the same. `meta` stands
for a GPU here: what is made there by mistake cannot be read."""

import ast
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset, WeightedRandomSampler

from shardkit import Accelerator
from tests import models
from tests.printed import ROOT

# Constructors that follow the default device.
MADE = {"arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros"}
FOLDERS = ("checkpoint", "data", "distributed", "doctor", "optim", "runtime", "sharding")
ON_THE_DEFAULT_DEVICE = {
    "distributed/xla.py": 1,  # PyTorch/XLA has no default device
    "optim/clip.py": 1,  # a norm of nothing, for the script, as torch's is
}


class Own(SequentialSampler):
    """A sampler that has to be iterated."""


class Numbers(IterableDataset):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[number] for number in range(len(self.data)))


def losses(folder: Path | None, default: str | None, strategy: int) -> list[float]:
    """Of each loop; half-way the state is saved and loaded."""
    fsdp = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": strategy}}
    torch.manual_seed(0)
    accelerator = Accelerator(config={"use_cpu": True, "num_processes": 2, "shardkit": {"seed": 1}, **fsdp})
    data = TensorDataset(torch.randn(16, 8))
    samplers = [None, Own(data), WeightedRandomSampler(torch.arange(1.0, 17.0), 16)]
    loaders = [DataLoader(data, 4, shuffle=one is None, sampler=one) for one in samplers]
    loaders.append(DataLoader(Numbers(data), 4))
    model = models.Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.set_default_device(default)
    try:
        model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
        found = []
        for loader in loaders:
            for (batch,) in loader:
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                found.append(accelerator.gather_for_metrics(loss.detach()).sum().item())
            if folder is not None:
                accelerator.save_state(folder / "state", blocking=loader is loaders[0])
                accelerator.load_state(folder / "state")
        accelerator._run.process.control.exchange("longer than a packet" * 100)
        return found
    finally:
        torch.set_default_device(None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_is_the_same_with_any_default_device(ranks, tmp_path, strategy):
    plain = ranks.run(2, losses, None, None, strategy)
    assert ranks.run(2, losses, tmp_path, "meta", strategy) == plain


def test_the_workers_of_a_loader_begin_with_any_default_device(alone):
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
    data = TensorDataset(torch.arange(8.0))
    torch.set_default_device("meta")
    try:
        loader = accelerator.prepare(DataLoader(data, 2, num_workers=1, multiprocessing_context="fork"))
        assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    finally:
        torch.set_default_device(None)


@pytest.mark.slow
def test_what_is_made_says_where():
    found = {
        str(path.relative_to(ROOT / "shardkit")): count
        for folder in FOLDERS
        for path in sorted(Path(ROOT, "shardkit", folder).rglob("*.py"))
        if (count := sum(map(_follows_the_default, ast.walk(ast.parse(path.read_text())))))
    }
    assert found == ON_THE_DEFAULT_DEVICE


def _follows_the_default(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MADE:
            return all(keyword.arg != "device" for keyword in node.keywords)
    return False
