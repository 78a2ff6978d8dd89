"""Steps until it is told to stop, as a training loop does. Says its pid, `step 2`, and `saving STEP` once told."""

import os

import torch.distributed as dist

from shardkit.distributed import progress
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.errors import Preempted
from shardkit.runtime.likely_mistakes.same_modules import noticed_late
from shardkit.runtime.steps import preemption

dist.init_process_group("gloo")
preemption.install()
watch = BackgroundAgreement(preemption.is_requested_here, noticed_late)
print(f"pid {os.getpid()} of rank {dist.get_rank()}")
for step in range(10**9):
    progress.post("step", step)
    dist.barrier()
    if step == 2:
        print("step 2")
    if watch.pass_boundary():
        print(f"saving {step}")
        raise Preempted(f"launch: told to stop after step {step}.")
