"""Ignores SIGTERM and stays."""

import os
import signal
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(f"pid {os.getpid()} of rank {os.environ['RANK']}")
time.sleep(600)
