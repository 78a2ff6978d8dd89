"""A training script for tests of the launched Accelerator: trains, stops at a requested step, resumes."""

import os
import signal
import sys
import time

import torch

from shardkit import Accelerator, ProjectConfiguration
from tests.training import loss_of, parts

folder, stop_at = sys.argv[1], int(sys.argv[2])
project = sys.argv[3] if len(sys.argv) > 3 else folder
accelerator = Accelerator(
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True),
)
torch.manual_seed(accelerator.process_index)
model, optimizer, loader, scheduler = accelerator.prepare(*parts(56, 4))
is_resumed = accelerator.resume()
accelerator.print(f"resumed {is_resumed} at step {accelerator.counters.step}")
while loader.epoch < 2:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and accelerator.counters.step == stop_at and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        if accelerator.counters.step >= stop_at:
            time.sleep(0.8)  # ranks agree within about a second
accelerator.save(dict(model.named_parameters()), f"{folder}/weights.safetensors")
accelerator.print(f"trained {accelerator.counters.step} steps, {accelerator.counters.samples_seen} samples")
accelerator.end_training()
