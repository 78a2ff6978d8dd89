"""A loop as diffusers' examples have it: a frozen encoder, a trained network, an average of its weights, hooks at save.

Arguments: output folder, samples a rank. Writes found.json.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn

OUT, SAMPLES = Path(sys.argv[1]), int(sys.argv[2])


class Average:
    """Exponential moving average of parameters, on each rank of what it holds."""

    def __init__(self, parameters):
        self.kept = [parameter.detach().clone() for parameter in parameters]

    def step(self, parameters):
        for kept, parameter in zip(self.kept, parameters, strict=True):
            kept.lerp_(parameter.detach(), 0.1)


accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=str(OUT)), mixed_precision="no")
set_seed(3)
encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).requires_grad_(False)
network = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
encoder.to(accelerator.device, dtype=torch.float32)
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
data = torch.randn(32, 4)
loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES)
called = []


def save_hook(models, weights, output_dir):
    called.append(("save", len(models)))


def load_hook(models, input_dir):
    called.append(("load", len(models)))


accelerator.register_save_state_pre_hook(save_hook)
accelerator.register_load_state_pre_hook(load_hook)
network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
average = Average(network.parameters())
losses = []


def epoch():
    for batch in loader:
        with accelerator.accumulate(network):
            with torch.no_grad():
                latents = encoder(batch)
            loss = nn.functional.mse_loss(network(latents), latents)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(network.parameters())
        losses.append(accelerator.reduce(loss.detach(), "mean").item())


epoch()
accelerator.save_state(str(OUT / "checkpoint"))
epoch()
expected = losses[-1]
accelerator.load_state(str(OUT / "checkpoint"))
epoch()
inner = copy.deepcopy(accelerator.get_state_dict(network))
norm = sum(float(part.norm()) for part in inner.values())
if accelerator.is_main_process:
    found = {"losses": losses, "same": losses[-1] == expected, "hooks": called, "norm": norm}
    (OUT / "found.json").write_text(json.dumps(found))
accelerator.end_training()
