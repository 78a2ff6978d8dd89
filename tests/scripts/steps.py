"""Steps until it is told to stop, as a training loop does. Says its pid, `step 2`, and `saving STEP` once told."""

import os

import torch.distributed as dist

from shardkit.distributed import progress
from shardkit.runtime import preemption

dist.init_process_group("gloo")
preemption.install()
print(f"pid {os.getpid()} of rank {dist.get_rank()}")
for step in range(10**9):
    progress.post("step", step)
    dist.barrier()
    if step == 2:
        print("step 2")
    preemption.stop_if_requested(lambda step=step: print(f"saving {step}"))
