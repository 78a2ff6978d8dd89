"""locked.py FOLDER: once both ranks are there, rank 1 takes a lock twice in step 1; rank 0 stays in step 2."""

import os
import sys
import threading
import time
from pathlib import Path

from shardkit.distributed import progress

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])


def take_twice(lock: threading.Lock) -> None:
    lock.acquire()
    (folder / "taken").touch()
    lock.acquire()


(folder / f"here.{rank}").touch()
while not (folder / f"here.{1 - rank}").exists():
    time.sleep(0.01)
if rank == 1:
    progress.post("data", 1)
    take_twice(threading.Lock())
progress.post("backward", 2)
time.sleep(600)
