"""A training loop on Accelerate, which knows nothing of shardkit."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for _ in range(2):
    accelerator.backward(model(torch.randn(2, 4)).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
print(f"world {accelerator.num_processes}, {accelerator.mixed_precision}, {type(model).__name__}")
