"""slow.py WHAT: trains a step; then something takes longer than the launcher waits. WHAT: compute, pause, sleep."""

import sys
import time

import torch

from shardkit import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train() -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.linalg.svd(torch.rand(40, 40))


train()
if sys.argv[1] == "compute":
    compute(9)
elif sys.argv[1] == "sleep":
    time.sleep(33 if accelerator.is_main_process else 0)
elif accelerator.is_main_process:
    with accelerator.pause("evaluation"):
        time.sleep(5)
    for _ in range(5):
        time.sleep(1)
        accelerator.progress("export")
train()
print("came through")
