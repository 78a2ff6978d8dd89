"""The first lines of every rank: ties it to the launcher, then runs the user's script as `__main__`.

    python -m shardkit.launch.bootstrap train.py --lr 3e-4
    python -m shardkit.launch.bootstrap -m package.module --lr 3e-4

Nothing here imports torch: a script that does not need it starts at once.
"""

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TextIO

from shardkit import env
from shardkit.errors import EXIT_PREEMPTED, ConfigError, ShardkitError
from shardkit.launch import failure, names, records
from shardkit.leaving import leave_torch_standing

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LEAVE_TIMEOUT_S = 30.0
OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


def main(arguments: list[str]) -> None:
    """Runs the script; the process ends with the code that the script would have ended with."""
    die_with(int(env.get(names.LAUNCHER_PID) or 0))
    folder, rank = Path(env.get(names.PROGRESS_DIR) or "."), int(env.get("RANK") or 0)
    place = records.PlaceWriter(folder, rank, int(env.get("LOCAL_RANK") or 0))
    log_dir = Path(env.get(names.LOG_DIR) or ".")
    log_file = open(names.log_path(log_dir, rank), "a", buffering=1)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=open(names.stack_path(log_dir, rank), "w"))  # noqa: SIM115
    place.post("starting", 0, is_watched=False)  # from here on the launcher sends signals
    connect_output(folder)
    code = 0
    try:
        check_world()
        run(arguments)
    except BaseException as error:
        code = report(folder, rank, error, log_file)
    leave(code)


def die_with(launcher: int) -> None:
    """From now on the kernel ends this process when its launcher dies, however it dies."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if launcher and os.getppid() != launcher:  # it died before the call above
        os._exit(128 + signal.SIGKILL)


def connect_output(folder: Path) -> None:
    """Sends stdout and stderr to the launcher, one whole line at a time."""
    local_rank = env.get("LOCAL_RANK") or "0"
    for name, number in (("out", 1), ("err", 2)):
        pipe = folder / f"{name}-{local_rank}"
        if pipe.exists():
            descriptor = os.open(pipe, os.O_WRONLY)
            os.dup2(descriptor, number)
            os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = text_stream(number)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def text_stream(descriptor: int) -> TextIO:
    """A stream that writes whole lines at once, and never fails on a character."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def check_world() -> None:
    """The world that came up is the world that was asked for, or nothing runs."""
    asked, came = env.get(names.NUM_PROCESSES), env.get("WORLD_SIZE")
    if asked and asked != came:
        raise ConfigError(
            f"launch: the world is {came} ranks, but the configuration asks for num_processes {asked}; "
            "give every machine the same num_machines and num_processes."
        )


def run(arguments: list[str]) -> None:
    """Runs `script arguments...` or `-m module arguments...` as Python itself would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(arguments[0]).resolve().parent)  # until now: the working folder
        run_script(str(Path(arguments[0]).absolute()))


def run_script(script: str) -> None:
    """Runs a file as a `__main__` that stays: classes of the script can be pickled, workers can be spawned."""
    module = ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__, __loader__=SourceFileLoader("__main__", script))
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)


def report(folder: Path, rank: int, error: BaseException, log_file) -> int:
    """Leaves the error where the launcher looks; the exit code. Only the rank's own log gets the traceback."""
    code = failure.exit_code_of(error)
    if code == 0:
        return 0
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    record = failure.describe(rank, error, OWN_FILES)
    expected = isinstance(error, (ShardkitError, SystemExit)) and not env.is_true("SHARDKIT_DEBUG")
    print(f"{record.kind}: {record.message}" if expected else record.traceback, file=log_file)
    records.write_error(folder, record)
    if code == EXIT_PREEMPTED or failure.collectives_of(str(error)):  # the others are to say where they are
        leave_together(folder, rank)
    return code


def leave_together(folder: Path, rank: int) -> None:
    """Waits for the machine's other ranks: torch elastic ends the rest as soon as the first has left."""
    ranks_here = int(env.get("LOCAL_WORLD_SIZE") or 1)
    until = time.monotonic() + LEAVE_TIMEOUT_S
    while len(records.read_errors(folder)) < ranks_here and time.monotonic() < until:
        time.sleep(0.02)


def leave(code: int) -> None:
    """Ends the process as Python would, but for a process group that the script has left open.

    Its threads are still running when C++ takes down what they stand on, and now and then that aborts a rank which
    was done ("terminate called without an active exception"). Else C++ has its end: profilers write their files then.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        sys.exit(code)
    leave_torch_standing(code)


if __name__ == "__main__":
    main(sys.argv[1:])
