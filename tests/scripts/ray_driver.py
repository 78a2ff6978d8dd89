"""ray_driver.py FOLDER WORKERS NAME [STEPS]: trains on Ray's workers, and reports a checkpoint every four steps.

WORKERS: a number, or FEWEST:MOST. Rank 0 writes `STEP LOSS` of each step into FOLDER/NAME.txt. The run named `dies`
loses a worker once, after step 9.
"""

import os
import sys
from pathlib import Path

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import shardkit.ray
from shardkit import Accelerator, Config, ProjectConfiguration, set_seed


def train(settings: dict) -> None:
    folder, name, steps = Path(settings["folder"]), settings["name"], settings["steps"]
    project = ProjectConfiguration(project_dir=str(folder / name), automatic_checkpoint_naming=True)
    accelerator = Accelerator(config=Config(use_cpu=True), project_config=project)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(dataset, batch_size=24 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not shardkit.ray.resume(accelerator) and list((folder / name).glob("checkpoints/*")):
        accelerator.load_state()
    if accelerator.is_main_process:
        with (folder / f"{name}.workers.txt").open("a") as file:
            file.write(f"{accelerator.num_processes}\n")
    while accelerator.counters.step < steps:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            mean, step = accelerator.reduce(loss.detach(), reduction="mean").item(), accelerator.counters.step
            if accelerator.is_main_process:
                with (folder / f"{name}.txt").open("a") as file:
                    file.write(f"{step} {mean!r}\n")
            if step % 4 == 0:
                shardkit.ray.report(accelerator, {"loss": mean, "step": step}, accelerator.save_state())
            died = folder / "died"
            if name == "dies" and step == 9 and accelerator.process_index == 1 and not died.exists():
                died.touch()
                os._exit(9)
            if step >= steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    folder, workers, name, *rest = sys.argv[1:]
    fewest, _, most = workers.partition(":")
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "name": name, "steps": int(rest[0]) if rest else 12},
        scaling_config=ScalingConfig(num_workers=(int(fewest), int(most)) if most else int(fewest)),
        run_config=RunConfig(name=name, storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=2)),
    ).fit()
