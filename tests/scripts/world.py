"""Says which rank of how many it is, and that the ranks reach one another."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, sum {total.item():g}, {sys.argv[1:]}")
print(f"config {os.path.basename(os.environ['SHARDKIT_RESOLVED_CONFIG'])}", file=sys.stderr)
dist.destroy_process_group()
