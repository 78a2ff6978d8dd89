"""losses.py FOLDER STEPS PAUSE_S [WORD...]: a small model; rank 0 writes `STEP LOSS` of each step into
FOLDER/losses.txt, the words that it was called with into FOLDER/words.txt. The state is saved in
FOLDER when the run is told to stop."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator, ProjectConfiguration, set_seed

folder, steps, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
folder.mkdir(exist_ok=True)
(folder / "words.txt").write_text(repr(sys.argv[4:]))
accelerator = Accelerator(
    project_config=ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
)
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(data, data.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=24 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()
while accelerator.counters.step < steps:
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        if accelerator.is_main_process:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{accelerator.counters.step} {mean!r}\n")
        time.sleep(pause_s)
        if accelerator.counters.step >= steps:
            break
accelerator.end_training()
