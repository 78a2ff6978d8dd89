"""What a rank is before and after it has loaded torch, as JSON: equal however ranks are started."""

import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings


class Thing:
    """Pickled by name."""


def double(number):
    return 2 * number


def signals():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)
    return [str(signal.getsignal(number)) for number in numbers] + [str(signal.pthread_sigmask(signal.SIG_BLOCK, []))]


def threads():
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main = sys.modules["__main__"]
    before = {
        "argv": sys.argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "options": [sys.warnoptions, {name: sys._xoptions[name] for name in sorted(sys._xoptions)}],
        "filters": [str(entry) for entry in warnings.filters],
        "main": {name: repr(main.__dict__.get(name)) for name in ("__name__", "__file__", "__spec__", "__package__")},
        "orig_argv": sys.orig_argv,
        "torch": [name in sys.modules for name in ("torch", "torch.nn", "shardkit.runtime")],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.gettrace()), gc.isenabled()],
        "threads": [threading.main_thread() is threading.current_thread(), threading.active_count()],
        "signals": signals(),
        "open files": sorted(
            os.readlink(f"/proc/self/fd/{name}").split(":[")[0].rpartition("/")[2]
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}")
        ),
        "session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "umask": [os.umask(0o22), os.getcwd()],
        "standard input": sys.stdin.read() if os.environ["RANK"] == "0" else None,
        "variables": {name: value for name, value in os.environ.items() if not name.startswith("SHARDKIT")},
    }
    import torch
    import torch.nn.functional as functional  # a submodule by itself
    from torch.distributed import is_available

    assert sys.modules["torch.nn.functional"] is functional
    assert torch.__spec__.loader is not None
    before["specs"] = [str(type(module.__spec__.loader)) for module in (torch, torch.nn, functional)]
    before["distributed"] = is_available()
    before["torch threads"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    before["multiply"] = torch.ones(64, 64).mm(torch.ones(64, 64)).sum().item()
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before["spawned"] = pool.map(double, [1, 2])
    print(json.dumps(before))
