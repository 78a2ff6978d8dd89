"""Calls that NCCL refuses, or in which ranks differ, on two devices of torch_openreg; writes what is raised.

shardkit launch -n 2 refused_on_device.py TOLD.json
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests import openreg

openreg.prepare()
rank = int(os.environ["RANK"])
torch.accelerator.set_device_index(rank)
dist.init_process_group("cpu:gloo,openreg:through_host")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device=torch.device("openreg", rank), dtype=dtype)


def written_to() -> None:
    sent, found = ones(2), ones(4)
    work = dist.all_gather_into_tensor(found, sent, async_op=True)
    sent.add_(1)
    work.wait()


CALLS = {
    "dtype": lambda: dist.all_reduce(ones(2, dtype=torch.int16)),
    "memory": lambda: dist.all_reduce(ones(2, 2, 2)[:, :, 0]),
    "device": lambda: dist.all_reduce(torch.ones(2, device=torch.device("openreg", 1 - rank))),
    "bits": lambda: dist.all_reduce(ones(2, dtype=torch.int32), dist.ReduceOp.BAND),
    "host": lambda: dist.all_gather([torch.ones(2), torch.ones(2)], ones(2)),
    "another dtype": lambda: dist.all_reduce(ones(2, dtype=torch.int32 if rank else torch.float32)),
    "another call": lambda: dist.broadcast(ones(2), 0) if rank else dist.all_reduce(ones(2)),
    "written to": written_to,
}
told = {}
for name, call in CALLS.items():
    try:
        call()
        told[name] = "taken"
    except RuntimeError as error:
        told[name] = str(error)
dist.barrier()
if rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(told))
dist.destroy_process_group()
