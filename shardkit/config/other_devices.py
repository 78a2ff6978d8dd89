"""Accelerators of which only torch knows: all but NVIDIA's and AMD's GPUs, which `hardware.py` finds by itself."""

import functools
import json
import platform
import subprocess
import sys
from importlib import metadata

from shardkit import new_process
from shardkit.log import get_logger

log = get_logger(__name__)

TIMEOUT_S = 120.0
EXTENSIONS = "torch.backends"
"""The group of entry points by which packages add devices to torch, which loads them with itself."""


@functools.cache
def found() -> tuple[tuple[str, int, str], ...]:
    """(name, memory in bytes or 0, kind) of each. Asks torch in a process of its own: ranks that are forked from this
    one could not use a device afterwards. Where nothing speaks for a device, torch is not asked: it takes seconds."""
    if not _may_exist():
        return ()
    command = new_process.command("shardkit.distributed.device_list")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return tuple((str(name), int(memory), str(kind)) for name, memory, kind in json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("torch could not be asked for this machine's devices (%s); none is assumed.", error)
        return ()


def _may_exist() -> bool:
    """Whether torch was built for, or is extended to, a device that `hardware.py` does not know."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return True
    try:
        return metadata.version("torch").endswith("+xpu") or bool(metadata.entry_points(group=EXTENSIONS))
    except metadata.PackageNotFoundError:
        return False
