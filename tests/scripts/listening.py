"""Prints the addresses on which this rank and its launcher listen, as /proc has them."""

import os
from pathlib import Path

import torch.distributed as dist

LISTENING = "0A"


def inodes_of(pid):
    links = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.islink(entry.path))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


dist.init_process_group("gloo")
dist.new_group([0, 1])
dist.barrier()
mine = inodes_of(os.getpid()) | inodes_of(os.getppid())
found = set()
for table in ("tcp", "tcp6"):
    for row in Path("/proc/net", table).read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == LISTENING and fields[9] in mine:
            found.add(fields[1].partition(":")[0])
print("listens on", *sorted(found))
dist.barrier()
dist.destroy_process_group()
