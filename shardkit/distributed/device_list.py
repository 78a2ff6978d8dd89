"""Prints this machine's accelerators as torch sees them.

JSON: [name, memory in bytes or 0, kind] of each. Run by `config/other_devices.py`.
"""

import json

import torch

from shardkit.distributed import accelerators


def main() -> None:
    kind = accelerators.kind()
    devices = [torch.device(kind, index) for index in range(accelerators.count())] if kind else []
    print(json.dumps([[accelerators.name_of(one), accelerators.total_bytes(one), kind] for one in devices]))
