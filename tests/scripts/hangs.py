"""hangs.py WHAT RANK FOLDER: trains; in its third step, or in a save or load after its second, a rank stands still.

WHAT: stop, busy, moving, lock, native, save, load. FOLDER gets the checkpoint and the mark that proves the fault.
"""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

import torch

from shardkit import Accelerator

what, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def stand_still() -> None:
    """This rank comes no further."""
    (folder / f"{what}.{rank}").touch()
    match what:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "busy":
            while True:
                pass
        case "moving":
            count_for_ever()
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "native":
            hold_the_interpreter()


def count_for_ever() -> None:
    """A loop whose stack is another one each time that somebody looks."""
    while True:
        go_down(60)


def go_down(depth: int) -> None:
    sum(range(1000))
    if depth:
        go_down(depth - 1)


def hold_the_interpreter() -> None:
    """A mutex taken twice in native code that does not give back the GIL: no other thread of Python runs again."""
    native, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)  # zeros: a plain mutex of pthread
    native.pthread_mutex_lock(mutex)
    native.pthread_mutex_lock(mutex)


accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.nn.Sequential(torch.nn.Linear(4, 4)))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
for step in range(3):
    if step == 2 and what in ("save", "load"):
        accelerator.save_state(folder / "good")
        point = "write" if what == "save" else "read"
        os.environ |= {"SHARDKIT_FAULT": f"{point}:{rank}:stop", "SHARDKIT_FAULT_MARKS": str(folder)}
        accelerator.save_state(folder / "bad") if what == "save" else accelerator.load_state(folder / "good")
    with accelerator.accumulate(model):
        loss = model(torch.ones(2, 4)).square().mean()
        if step == 2 and accelerator.process_index == rank:
            stand_still()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print("nothing stood still")
