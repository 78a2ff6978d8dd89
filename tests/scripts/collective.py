"""collective.py WHAT: rank 1 goes wrong while rank 0 waits for it in a collective."""

import os
import sys

import torch
import torch.distributed as dist


def step(what: str) -> None:
    if dist.get_rank() == 1:
        if what == "raise":
            raise ValueError("bad sample at index 1234")
        if what == "exit":
            sys.exit(0)
        if what == "_exit":
            os._exit(0)
    dist.all_reduce(torch.ones(4))


dist.init_process_group("gloo")
dist.barrier()
step(sys.argv[1])
