"""mismatch.py WHAT FOLDER: two ranks are in different collectives, of one group (kind, shape) or of two (group)."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardkit import Accelerator
from shardkit.distributed import progress


def reduce_here() -> None:
    dist.all_reduce(torch.ones(4))


def go_elsewhere(what: str, group: dist.ProcessGroup | None) -> None:
    match what:
        case "kind":
            dist.broadcast(torch.ones(4), 0)
        case "shape":
            dist.all_reduce(torch.ones(5))
        case "group":
            dist.all_reduce(torch.ones(4), group=group)


accelerator = Accelerator()
progress.post("step", 7)
Path(sys.argv[2], f"reached.{accelerator.process_index}").touch()
group = dist.new_group(backend="gloo")
if accelerator.process_index == 0:
    reduce_here()
else:
    go_elsewhere(sys.argv[1], group)
print(f"nothing went wrong: {dist.get_debug_level()}")
