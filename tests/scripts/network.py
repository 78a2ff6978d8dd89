"""network.py WHAT: trains on several machines until something happens; with `stop` rank 1 stops itself."""

import os
import signal
import sys
import time

import torch

from shardkit import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(2000):
    with accelerator.accumulate(model):
        loss = model(torch.ones(2, 4)).sum()
        if step == 5:
            print("trains", flush=True)
            if sys.argv[1] == "stop" and accelerator.process_index == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.05)
