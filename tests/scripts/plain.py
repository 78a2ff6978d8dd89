"""plain.py WHAT: ranks without an Accelerator; rank 1 does something else than rank 0. WHAT: spin, sleep, mismatch."""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()


def go_elsewhere() -> None:
    match sys.argv[1]:
        case "spin":
            until = time.monotonic() + 10
            while time.monotonic() < until:
                pass
        case "sleep":
            time.sleep(600)
        case "mismatch":
            dist.recv(torch.ones(1), 0)


if dist.get_rank() == 1:
    go_elsewhere()
dist.all_reduce(torch.ones(1))
print("came through")
