"""The first code in every rank: connects it to the launcher, then runs the user's script as `__main__`.

    python shardkit/launch/bootstrap.py train.py --lr 3e-4
    python shardkit/launch/bootstrap.py -m package.module --lr 3e-4

or `main` with the same arguments, in a forked process (`forking.py`). Nothing here imports torch, so that a script
which does not need it starts at once.

It runs as a file: with `python -m`, files of the working folder would be imported in place of modules with their names.
"""

import ctypes
import faulthandler
import io
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, TextIO

if __name__ == "__main__" and (own := str(Path(__file__).parents[2])) not in sys.path:
    sys.path.append(own)  # of a launcher that found shardkit in its working folder

from shardkit import env
from shardkit.errors import EXIT_PREEMPTED, ConfigError, ShardkitError
from shardkit.fast_exit import exit_without_torch_teardown
from shardkit.launch import failure, names, preloaded, processes, rank_files, signals

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SOCKET_BYTES = 107
"""The longest path of a socket (unix(7))."""
LEAVE_TIMEOUT_S = 30.0
OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


def main(arguments: list[str]) -> int:
    """Runs the script. Returns the exit code that Python would have."""
    die_with(int(env.get(names.LAUNCHER_PID) or 0))
    signals.as_in_new_process()
    folder, rank = Path(env.get(names.PROGRESS_DIR) or "."), int(env.get("RANK") or 0)
    progress = rank_files.ProgressWriter(folder, rank, int(env.get("LOCAL_RANK") or 0))
    log_dir = Path(env.get(names.LOG_DIR) or ".")
    log_file = open(names.log_path(log_dir, rank), "ab", buffering=0, opener=rank_files.private)  # noqa: SIM115
    faulthandler.enable()
    # A descriptor, since it stays open until the process ends: a file would be warned of under python -X dev. After a
    # restart the stacks of the hang before it are still there.
    stack_file = rank_files.private(str(names.stack_path(log_dir, rank)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(processes.STACKS_SIGNAL, file=stack_file)
    processes.take_stack_signals()
    progress.post("starting", 0, is_watched=False)  # from here on the launcher sends signals
    connect_output(folder)
    if rank:
        leave_input()
    own_pid = os.getpid()
    with log_file:
        try:
            check_world()
            env.mark(names.LAUNCHED, names.BY_LAUNCHER)
            with exit_0_is_an_end(), around_script(log_dir):
                run(arguments)
            if os.getpid() == own_pid:
                finish_on_device()
        except BaseException as error:
            if os.getpid() != own_pid:
                return end_of_fork(error)
            return report(folder, rank, error, log_file)
    return 0


def keep_sockets_in(folder: Path, multiprocessing: ModuleType) -> None:
    """Lets the module multiprocessing.process make the sockets of this rank and of its workers in the launch's folder,
    which is removed in any case, if its path is short enough for one. A folder of their own (`pymp-*`) would stay where
    they are killed."""
    if len(os.fsencode(folder / "listener-12345678")) <= SOCKET_BYTES:
        multiprocessing.current_process()._config["tempdir"] = str(folder)


def die_with(launcher: int) -> None:
    """Make the kernel kill this process when its launcher dies (PR_SET_PDEATHSIG)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if launcher and os.getppid() != launcher:  # it died before the call above
        os._exit(128 + signal.SIGKILL)


def connect_output(folder: Path) -> None:
    """Redirects stdout and stderr to the launcher, line-buffered."""
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
    """Redirects stdin to /dev/null, so that only rank 0 reads the terminal (`input()`, debuggers)."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def text_stream(descriptor: int) -> TextIO:
    """A line-buffered text stream that escapes characters which cannot be encoded."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def check_world() -> None:
    """Raises ConfigError if the world size differs from num_processes."""
    expected, actual = env.get(names.NUM_PROCESSES), env.get("WORLD_SIZE")
    if expected and expected != actual:
        raise ConfigError(
            f"launch: the world size differs from num_processes {expected} (got {actual}); "
            "give every machine the same num_machines and num_processes."
        )


def around_script(log_dir: Path) -> AbstractContextManager[None]:
    """The context manager in which the script runs, from the module in SHARDKIT_AROUND_SCRIPT. It is imported by name,
    since it is in a layer above the launcher."""
    module = env.get(names.AROUND_SCRIPT)
    return import_module(module).around_script(log_dir) if module else nullcontext()


def run(arguments: list[str]) -> None:
    """Runs `script arguments...` or `-m module arguments...` as Python would.

    `__main__` is the script's module until the end, so its classes can be pickled, and workers can be spawned.
    """
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__dict__["__builtins__"] = __builtins__
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        put_first_in_path(Path.cwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif preloaded.is_container(arguments[0]):
        sys.argv = arguments
        sys.path[: not ignores_script_folder()] = [str(Path(arguments[0]).absolute())]
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.argv = arguments
        put_first_in_path(Path(arguments[0]).resolve().parent)
        run_script(str(Path(arguments[0]).absolute()), main_module.__dict__)


@contextmanager
def exit_0_is_an_end() -> Iterator[None]:
    """A script may end by `sys.exit(main())`: with code 0 that is an end as any other, and no error."""
    try:
        yield
    except SystemExit as error:
        if failure.exit_code_of(error) != 0:
            raise


def finish_on_device() -> None:
    """Waits for what the script has begun on its accelerator. Without that a rank which ends early would take its part
    of a collective with it, for which the others wait there; and an error there would be lost."""
    if "torch" in sys.modules:
        import_module("shardkit.distributed.accelerators").finish()


def put_first_in_path(folder: Path) -> None:
    """Replaces the first entry of sys.path by the script's folder, as Python would set it."""
    if not ignores_script_folder():
        sys.path[0] = str(folder)


def ignores_script_folder() -> bool:
    """Whether Python leaves the script's folder out of sys.path: -P (since 3.11) and -I. It adds a folder or zip file
    that it runs all the same."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def run_script(script: str, namespace: dict[str, object]) -> None:
    """Runs a file in the namespace of `__main__`."""
    if script.endswith(".pyc"):
        compiled = SourcelessFileLoader("__main__", script)
        namespace.update(__file__=script, __cached__=None, __loader__=compiled)
        exec(compiled.get_code("__main__"), namespace)  # type: ignore[arg-type]  # None: of a namespace package only
        return
    namespace.update(__file__=script, __cached__=None, __loader__=SourceFileLoader("__main__", script))
    exec(compile(Path(script).read_bytes(), script, "exec"), namespace)


def report(folder: Path, rank: int, error: BaseException, log_file: BinaryIO) -> int:
    """Writes the error for the launcher, and returns the exit code. The traceback is written only to the rank's log."""
    code = failure.exit_code_of(error)
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    record = failure.describe(rank, error, OWN_FILES)
    expected = isinstance(error, (ShardkitError, SystemExit)) and not env.is_true("SHARDKIT_DEBUG")
    text = f"{record.kind}: {record.message}" if expected else record.traceback
    with suppress(OSError):  # a full disk; the launcher still gets the error below
        log_file.write(f"{text}\n".encode(errors="backslashreplace"))
    try:
        rank_files.write_error(folder, record)
    except OSError as problem:  # the launcher's temporary folder is full or was removed
        print(f"{text.rstrip()}\nlaunch: the error above could not be reported: {problem}", file=sys.stderr)
    call_own_hook(error, log_file)
    if code == EXIT_PREEMPTED or failure.collectives_of(failure.text_of(error)):  # let the other ranks report, too
        leave_together(folder)
    return code


def end_of_fork(error: BaseException) -> int:
    """Prints the error that ends a process which the script has forked, as Python would: the rank, which goes on, did
    not fail. Returns the exit code."""
    if not isinstance(error, SystemExit):
        print(failure.render(error, OWN_FILES), end="", file=sys.stderr)
    elif isinstance(error.code, str):
        print(error.code, file=sys.stderr)
    return failure.exit_code_of(error)


def call_own_hook(error: BaseException, log_file: BinaryIO) -> None:
    """Calls the `sys.excepthook` that the script or a library has set, as Python would: trackers note there that a run
    has failed. What it prints goes to the rank's log, since the launcher prints the traceback."""
    hook = failure.own_excepthook()
    if hook is sys.__excepthook__ or isinstance(error, SystemExit):
        return
    printed = io.StringIO()
    with redirect_stderr(printed), suppress(Exception, SystemExit):  # the error that is reported stays the first one
        hook(type(error), error, error.__traceback__)
    with suppress(OSError):
        log_file.write(printed.getvalue().encode(errors="backslashreplace"))


def leave_together(folder: Path) -> None:
    """Waits for the machine's other ranks to report: the launcher kills the rest soon after the first has exited."""
    ranks_here = int(env.get("LOCAL_WORLD_SIZE") or 1)
    until = time.monotonic() + LEAVE_TIMEOUT_S
    while len(rank_files.read_errors(folder)) < ranks_here and time.monotonic() < until:
        time.sleep(0.02)


def has_open_group() -> bool:
    """Whether the script has not destroyed its process group.

    The group's threads still run while C++ destroys global objects, which sometimes aborts a rank that has finished
    ("terminate called without an active exception").
    """
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


if __name__ == "__main__":
    keep_sockets_in(Path(env.get(names.PROGRESS_DIR) or "."), import_module("multiprocessing.process"))
    code = main(sys.argv[1:])
    if has_open_group():
        exit_without_torch_teardown(code)
    sys.exit(code)
