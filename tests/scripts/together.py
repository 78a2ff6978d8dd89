"""Says which rank of how many this is, and the sum of all ranks' numbers."""

import torch

from shardkit import Accelerator

accelerator = Accelerator(cpu=True)
mine = torch.tensor([accelerator.process_index + 1.0])
print(f"rank {accelerator.process_index} of {accelerator.num_processes}, sum {accelerator.reduce(mine).item():g}")
accelerator.end_training()
