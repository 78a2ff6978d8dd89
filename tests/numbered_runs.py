"""Small runs of the Accelerator over numbered samples, for tests of what a checkpoint continues; functions on ranks."""

import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator, ProjectConfiguration
from shardkit.runtime.checkpoints import saving


def run_of(project, workers=0, limit=None, seed=3, **settings):
    """A small run over 40 numbered samples, shuffled, with dropout; the accelerator, its parts and nothing trained."""
    wrap = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    given = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": wrap, "shardkit": {"seed": seed, **settings}}
    naming = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(config=given, project_config=naming)
    model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.2), nn.Linear(9, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    numbers = torch.arange(40)
    data = TensorDataset(numbers, torch.sin(numbers[:, None] * torch.arange(1, 5) / 7))
    loader = DataLoader(data, batch_size=12 // accelerator.num_processes, shuffle=True, num_workers=workers)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(run, steps):
    """Train that many optimizer steps, over the ends of epochs; (samples seen in order, loss) of each."""
    accelerator, model, optimizer, loader, scheduler = run
    seen = []
    while True:
        for numbers, inputs in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append((accelerator.gather_for_metrics(numbers).sort().values.tolist(), loss.item()))
            if len(seen) == steps:
                return seen


def uninterrupted(project, steps):
    return train(run_of(project), steps)


def in_parts(project, parts, workers):
    """Train in parts, each a run of its own that resumes the one before."""
    multiprocessing.current_process()._config["daemon"] = workers == 0  # the pool's ranks may have children here
    seen = []
    for number, steps in enumerate(parts):
        run = run_of(project, workers, seed=3 if number == 0 else 100 + number)
        if number == 0:
            assert not run[0].resume()
        else:
            run[0].load_state()
        assert run[0].counters.step == sum(parts[:number])
        seen += train(run, steps)
        run[0].save_state()
        saving.close(run[0]._run)
    multiprocessing.current_process()._config["daemon"] = True
    return seen
