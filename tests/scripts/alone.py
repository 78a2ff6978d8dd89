"""alone.py WHAT: rank 1 ends in one of many ways; rank 0 stays until it is ended. Needs no torch."""

import ctypes
import os
import signal
import sys
import time

what = sys.argv[1]
if os.environ["RANK"] == "1":
    if what == "raise":
        raise RuntimeError("before any process group")
    if what == "exit":
        sys.exit(3)
    if what == "segv":
        ctypes.string_at(0)
    if what == "abort":
        os.abort()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
