"""elastic.py FOLDER STEPS PAUSE_S: a small model; rank 0 writes `[step, loss, samples, world]` of each
step into FOLDER/steps.jsonl. Saves every second step; waits after a step while there is a file FOLDER/hold."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from shardkit import Accelerator, ProjectConfiguration, set_seed

SAMPLES, BATCH = 96, 4


def data() -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return [(number, one, one.sum(0, keepdim=True)) for number, one in enumerate(inputs)]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def main(folder: Path, steps: int, pause_s: float) -> None:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, project_config=project)
    model, optimizer = model_and_optimizer()
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()
    print(f"pid {os.getpid()} at step {accelerator.counters.step}", flush=True)
    losses, samples = [], []
    while accelerator.counters.step < steps:
        for numbers, inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            samples += accelerator.gather(numbers).tolist()
            time.sleep(pause_s)
            if not accelerator.sync_gradients:
                continue
            step = accelerator.counters.step
            if accelerator.is_main_process:
                with (folder / "steps.jsonl").open("a") as file:
                    line = [step, sum(losses) / len(losses), sorted(samples), accelerator.num_processes]
                    file.write(json.dumps(line) + "\n")
            losses, samples = [], []
            if step % 2 == 0:
                accelerator.save_state()
            while (folder / "hold").exists():
                time.sleep(0.05)
            if step >= steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(exist_ok=True)
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
