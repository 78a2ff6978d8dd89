"""The first lines of every rank: ties it to the launcher, then runs the user's script as `__main__`.

    python -m shardkit.launch.bootstrap train.py --lr 3e-4
    python -m shardkit.launch.bootstrap -m package.module --lr 3e-4

or the same arguments to `main`, in a process that was forked (`forking.py`). Nothing here imports torch: a script that
does not need it starts at once.
"""

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import TextIO

from shardkit import env
from shardkit.errors import EXIT_PREEMPTED, ConfigError, ShardkitError
from shardkit.fast_exit import exit_without_torch_teardown
from shardkit.launch import failure, names, processes, rank_files

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LEAVE_TIMEOUT_S = 30.0
OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


def main(arguments: list[str]) -> int:
    """Runs the script; the code that Python would end its process with."""
    die_with(int(env.get(names.LAUNCHER_PID) or 0))
    folder, rank = Path(env.get(names.PROGRESS_DIR) or "."), int(env.get("RANK") or 0)
    place = rank_files.ProgressWriter(folder, rank, int(env.get("LOCAL_RANK") or 0))
    log_dir = Path(env.get(names.LOG_DIR) or ".")
    log_file = open(names.log_path(log_dir, rank), "a", buffering=1)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(processes.STACKS_SIGNAL, file=open(names.stack_path(log_dir, rank), "w"))  # noqa: SIM115
    processes.take_stack_signals()
    place.post("starting", 0, is_watched=False)  # from here on the launcher sends signals
    connect_output(folder)
    if rank:
        leave_input()
    try:
        check_world()
        with around_script(log_dir):
            run(arguments)
    except BaseException as error:
        return report(folder, rank, error, log_file)
    return 0


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


def leave_input() -> None:
    """What is typed goes to rank 0 alone: to `input()`, to a debugger."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


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


def around_script(log_dir: Path) -> AbstractContextManager[None]:
    """What the command wants around the script; the modules that it needs come from a layer that the launcher does not
    know."""
    module = env.get(names.AROUND_SCRIPT)
    return import_module(module).around_script(log_dir) if module else nullcontext()


def run(arguments: list[str]) -> None:
    """Runs `script arguments...` or `-m module arguments...` as Python itself would.

    `__main__` stays what it was to the end: classes of the script can be pickled, workers can be spawned.
    """
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        put_first_in_path(Path.cwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif Path(arguments[0]).is_dir():
        sys.argv = arguments
        put_first_in_path(Path(arguments[0]).absolute())
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.argv = arguments
        put_first_in_path(Path(arguments[0]).resolve().parent)
        run_script(str(Path(arguments[0]).absolute()), main_module.__dict__)


def put_first_in_path(folder: Path) -> None:
    """Puts the folder where Python puts the script's, in place of that with which this process was started."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # python -P (since 3.11) and -I: no such folder
        sys.path[0] = str(folder)


def run_script(script: str, names: dict[str, object]) -> None:
    """Runs a file in the namespace of `__main__`."""
    names.update(__file__=script, __cached__=None, __loader__=SourceFileLoader("__main__", script))
    exec(compile(Path(script).read_bytes(), script, "exec"), names)


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
    rank_files.write_error(folder, record)
    if code == EXIT_PREEMPTED or failure.collectives_of(str(error)):  # the others are to say where they are
        leave_together(folder, rank)
    return code


def leave_together(folder: Path, rank: int) -> None:
    """Waits for the machine's other ranks: the launcher ends the rest as soon as the first has left."""
    ranks_here = int(env.get("LOCAL_WORLD_SIZE") or 1)
    until = time.monotonic() + LEAVE_TIMEOUT_S
    while len(rank_files.read_errors(folder)) < ranks_here and time.monotonic() < until:
        time.sleep(0.02)


def has_open_group() -> bool:
    """Whether the script has left its process group open.

    Its threads are still running when C++ takes down what they stand on, and now and then that aborts a rank which
    was done ("terminate called without an active exception").
    """
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if has_open_group():
        exit_without_torch_teardown(code)
    sys.exit(code)
