"""Forks ranks from one process that has imported torch, so that all ranks together need one import.

    launcher ---- fork ----> template (has imported torch, has no threads, waits)
                                 `-- fork --> a helper for one start, which forks all ranks and exits:
                                                  the kernel then makes the ranks children of the launcher

A forked rank starts with the launcher's modules loaded. `why_not` and `why_not_now` return why that would behave
differently from a new interpreter. In that case each rank is started as a new Python process.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from shardkit import env
from shardkit.errors import MachineError
from shardkit.fast_exit import exit_without_interpreter_teardown, exit_without_torch_teardown
from shardkit.launch import bootstrap, names, preloaded
from shardkit.launch.preloaded import Before, Preloaded, Taken
from shardkit.launch.spec import rank_command

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that the template blocks, since schedulers signal every process of a job."""
DIED = "the template process has died"

# ---- whether ranks can be forked ----


def why_not(script: str, is_module: bool, device: str) -> str | None:
    """Why the ranks of a script cannot be forked from a process that has imported torch; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"forking ranks is only supported on Linux (got {sys.platform})"
    if device == "xla":
        return "torch_xla does not work in a forked process"
    if count_threads() > 1:
        return "the launcher's process has other threads (of a debugger or profiler)"
    if found := preloaded.variables_set(script, is_module):
        return f"{script} or a module next to it sets {', '.join(found)}, which torch reads when it is imported"
    return None


def hidden_by(folder: Path) -> list[str]:
    """Files in a script's folder with the name of a loaded module: a new interpreter would import them instead."""
    with suppress(OSError):
        return sorted(entry.name for entry in folder.iterdir() if _hides(entry))
    return []


def _hides(entry: Path) -> bool:
    loaded = sys.modules.get(entry.name.split(".")[0])
    is_module = entry.suffix in {".py", ".so"} or (entry / "__init__.py").is_file()
    if loaded is None or not is_module or loaded.__name__ == "__main__":
        return False
    return getattr(loaded, "__file__", None) not in {str(entry), str(entry / "__init__.py")}


def count_threads() -> int:
    """The number of threads of this process, including native ones; 1 if unknown."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 1


def why_not_now(folder: Path, expected_threads: int) -> str | None:
    """Why this process, with torch imported, cannot be forked for a script in this folder; None if it can.

    `expected_threads`: threads that survive a fork: numpy's OpenBLAS stops its threads before and restarts them after.
    """
    hidden = hidden_by(folder)
    if hidden:
        return f"{hidden[0]} next to the script has the name of a module that the launcher has loaded"
    if not (adopt_orphans(True) and adopt_orphans(False)):
        return "the kernel does not support PR_SET_CHILD_SUBREAPER"
    return why_not_with_torch(expected_threads)


def why_not_with_torch(expected_threads: int) -> str | None:
    """Why the state of the loaded libraries prevents a fork; None if it does not."""
    if count_threads() > expected_threads:
        return "a library that torch loads has started threads, which do not exist in a forked process"
    devices = open_devices()
    return f"{devices[0]} is already open, which does not work in a forked process" if devices else None


def open_devices() -> list[str]:
    """Device files that this process has open: CUDA and ROCm open them at their first use."""
    with suppress(OSError):
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
        return sorted(link for link in links if link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")))
    return []


def adopt_orphans(is_wanted: bool) -> bool:
    """Make this process adopt descendants whose parent has ended, or stop that. Returns whether it succeeded."""
    return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) == 0


# ---- the launcher's side ----


class Template:
    """The process from which ranks are forked, until `close`. The current process must not have other threads."""

    def __init__(self, modules: Sequence[str], before: Before, expected_threads: int) -> None:
        """`modules`: modules that ranks will import; the template imports them in the background.

        `before`: the state of the interpreter before it imported torch, which a rank starts with.
        `expected_threads`: see `why_not_now`.
        """
        self._problem: str | None = "unknown"
        ours, its = socket.socketpair()
        launcher = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = fork()
        if self.pid == 0:
            ours.close()
            _serve(its, launcher, modules, before, expected_threads)
        its.close()
        self._stream = ours.makefile("rwb")
        ours.close()

    def problem(self) -> str | None:
        """Why ranks cannot be forked after the modules were imported; None if they can."""
        if self._problem == "unknown":
            self._problem = self._read()["problem"]
        if self._problem is None:  # it may have been killed with the ranks, and not have ended yet
            self._problem = self._ask({}).get("problem")
        return self._problem

    def start(self, arguments: Sequence[str], shared: Mapping[str, str], own: Sequence[Mapping[str, str]]) -> list[int]:
        """Fork ranks that run these bootstrap arguments, with the shared and their own variables. Returns their pids.

        Call it only if `problem` returned None. The ranks are children of this process. Raises MachineError if forking
        failed; then no rank is left.
        """
        request = {"arguments": list(arguments), "shared": dict(shared), "own": [dict(one) for one in own]}
        adopt_orphans(True)  # only for the ranks, not for orphans of ranks
        try:
            answer = self._ask(request)
        finally:
            adopt_orphans(False)
        if "problem" in answer:
            raise MachineError(
                f"launch: {len(own)} ranks could not be forked ({answer['problem']}); "
                "free memory and process slots on this machine, or try --start exec."
            )
        return list(answer["pids"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request; to an empty one an empty answer. A template that has died answers with a problem."""
        try:
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            return self._read()
        except OSError:
            return {"problem": DIED}

    def _read(self) -> dict[str, Any]:
        return json.loads(self._stream.readline() or json.dumps({"problem": DIED}))

    def close(self) -> None:
        """End the template. Ranks are not affected."""
        with suppress(OSError):  # of a request that a dead template has not read
            self._stream.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Forked:
    """A forked rank, with the part of subprocess.Popen's interface that is used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


# ---- the template's side: these functions never return to the launcher's code ----


def fork() -> int:
    """os.fork without Python's warning (since 3.12) about threads: the only threads are those of numpy's OpenBLAS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(
    connection: socket.socket, launcher: int, modules: Sequence[str], before: Before, expected_threads: int
) -> NoReturn:
    try:
        os.setsid()  # so that Ctrl-C in a terminal only reaches the launcher
        bootstrap.die_with(launcher)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        for module in modules:
            with suppress(Exception):  # a rank that imports it reports the error
                importlib.import_module(module)
        greeting = {"problem": why_not_with_torch(expected_threads)}
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        taken = preloaded.take_out(before)
        gc.freeze()  # otherwise the first collection in each rank would write to, and copy, all pages of torch objects
        stream = connection.makefile("rb")
        for request in map(json.loads, stream):
            if not request:
                connection.sendall(b"{}\n")
                continue
            reader, writer = os.pipe()
            helper = fork()
            if helper == 0:
                stream.close()
                connection.close()
                os.close(reader)
                _fork_ranks(writer, request, mask, launcher, taken)
            os.close(writer)
            os.waitpid(helper, 0)  # from now on the ranks are children of the launcher
            with open(reader, "rb") as answer:
                connection.sendall(answer.read() or b'{"problem": "the helper process has died"}\n')
    finally:
        os._exit(0)


def _fork_ranks(writer: int, request: Any, mask: Any, launcher: int, taken: Taken) -> NoReturn:
    helper, pids = os.getpid(), []
    try:
        for own in request["own"]:
            pid = fork()
            if pid == 0:
                os.close(writer)
                variables = {**request["shared"], **own}
                _become_rank(helper, launcher, request["arguments"], variables, mask, taken)
            pids.append(pid)
        answer: dict[str, Any] = {"pids": pids}
    except OSError as error:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        answer = {"problem": error.strerror}
    os.write(writer, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def _become_rank(
    helper: int,
    launcher: int,
    arguments: list[str],
    variables: dict[str, str],
    mask: Any,
    taken: Taken,
) -> NoReturn:
    try:
        os.setsid()
        while os.getppid() == helper:
            time.sleep(0.0005)
        bootstrap.die_with(launcher)
        env.replace(variables)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        forget_random_state(taken.modules)
        process = sys.modules.get("multiprocessing.process") or taken.modules["multiprocessing.process"]
        bootstrap.keep_sockets_in(Path(variables[names.PROGRESS_DIR]), process)
        sys.orig_argv = rank_command(arguments)
        sys.meta_path.insert(0, Preloaded(taken, sys.orig_argv))
        code = bootstrap.main(arguments)
        if bootstrap.has_open_group():
            exit_without_torch_teardown(code)
        exit_without_interpreter_teardown(code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def forget_random_state(modules: Mapping[str, Any]) -> None:
    """Reseed torch and numpy, so that ranks have different random numbers. Python's `random` does so by itself."""
    modules["torch"].default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
