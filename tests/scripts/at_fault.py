"""Rank 1 raises in the first attempt, while the others wait for it; afterwards all is well."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if dist.get_rank() == 1 and attempt == "0":
    raise ValueError("rank 1 is at fault")
dist.barrier()
print("attempt", attempt, "went well")
dist.destroy_process_group()
