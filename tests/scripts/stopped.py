"""Rank 1 is stopped from outside in its first step; rank 0 waits in its second."""

import os
import signal
import time
from pathlib import Path

from shardkit.distributed import progress

if os.environ["RANK"] == "1":
    progress.post("data", 1)
    while not Path("rank-0-waits").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSTOP)
progress.post("backward", 2)
Path("rank-0-waits").touch()
time.sleep(600)
