"""Ranks that are forked from one process which has loaded torch, so that many start at the cost of one import.

    launcher ---- fork ----> template (has torch, has no thread, waits)
                                 `-- fork --> a helper for one start, which forks every rank and ends:
                                                  the ranks are then children of the launcher, as if it had started them

A rank begins with the launcher's modules loaded. `why_not` and `why_not_now` name what such a rank would find otherwise
than a fresh interpreter does; there each rank is a Python of its own.
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
from shardkit.launch import bootstrap, preloaded
from shardkit.launch.preloaded import Before, Preloaded, Taken
from shardkit.launch.spec import python_command

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
"""Schedulers signal every process of a job; none of these ends the template."""

# ---- whether ranks can be forked ----


def why_not(script: str, is_module: bool, device: str) -> str | None:
    """Why the ranks of a script cannot be forked from a process that has loaded torch; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"ranks can be forked on Linux only (this is {sys.platform})"
    if device == "xla":
        return "torch_xla does not run in a forked process"
    if count_threads() > 1:
        return "the launcher has threads that are not its own (a debugger's, a profiler's)"
    names = preloaded.variables_set(script, is_module)
    if names:
        return f"{script} or a module beside it sets {', '.join(names)}, which torch reads when it is imported"
    return None


def hidden_by(folder: Path) -> list[str]:
    """What lies in a script's folder under the name of a loaded module: a fresh interpreter would import it instead."""
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
    """Threads of this process, native ones too; 1 where the system does not tell."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return 1


def why_not_now(folder: Path, expected_threads: int) -> str | None:
    """Why this process, with torch loaded, cannot be forked now for a script in this folder; None where it can.

    `expected_threads` are those that survive a fork: numpy's OpenBLAS ends its own before one, and starts them after.
    """
    hidden = hidden_by(folder)
    if hidden:
        return f"{hidden[0]} beside the script has the name of a module that the launcher has loaded"
    if not (adopt_orphans(True) and adopt_orphans(False)):
        return "the kernel does not let the launcher adopt its ranks"
    return why_not_with_torch(expected_threads)


def why_not_with_torch(expected_threads: int) -> str | None:
    """What the libraries of this process have done that a fork would break; None where nothing."""
    if count_threads() > expected_threads:
        return "a library that torch loads has started threads, which a forked process would miss"
    devices = open_devices()
    return f"{devices[0]} is in use already, which does not work in a forked process" if devices else None


def open_devices() -> list[str]:
    """Accelerators that this process has opened, as CUDA's and ROCm's drivers do when they are first used."""
    with suppress(OSError):
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
        return sorted(link for link in links if link.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")))
    return []


def adopt_orphans(is_wanted: bool) -> bool:
    """Whether the kernel now makes this process the parent of descendants whose own parent has ended, or no longer."""
    return ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0) == 0


# ---- the launcher's side ----


class Template:
    """The process that ranks are forked from, until `close`. Only for a process without threads of its own."""

    def __init__(self, modules: Sequence[str], before: Before, expected_threads: int) -> None:
        """`modules`: what ranks will import anyway; loaded in the template, beside the launcher's own work.

        `before`: how this process was before it loaded torch, and how a rank is before its script does.
        `expected_threads`: see `why_not_now`.
        """
        self._problem: str | None = "not known yet"
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
        """Why no rank can be forked after all, now that the modules are loaded; None where it can be."""
        if self._problem == "not known yet":
            self._problem = self._read()["problem"]
        return self._problem

    def start(self, arguments: Sequence[str], shared: Mapping[str, str], own: Sequence[Mapping[str, str]]) -> list[int]:
        """The processes of ranks that run these bootstrap arguments, each with the shared variables and its own.

        For after `problem` was None. They are children of this process. Raises MachineError where they could not be
        forked; then there are none.
        """
        request = {"arguments": list(arguments), "shared": dict(shared), "own": [dict(one) for one in own]}
        adopt_orphans(True)  # the ranks and nobody else: what a rank leaves behind is none of ours
        try:
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            answer = self._read()
        except OSError as error:
            answer = {"problem": error.strerror}
        finally:
            adopt_orphans(False)
        if "problem" in answer:
            raise MachineError(
                f"launch: {len(own)} ranks could not be forked ({answer['problem']}); "
                "give the machine room for them, or try --start exec."
            )
        return list(answer["pids"])

    def _read(self) -> dict[str, Any]:
        return json.loads(self._stream.readline() or b'{"problem": "the process they are forked from has died"}')

    def close(self) -> None:
        """End the template. Ranks are not affected."""
        self._stream.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Forked:
    """A rank's process, with the part of subprocess.Popen that is needed."""

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


# ---- the template's side: nothing here ever returns to the launcher's code ----


def fork() -> int:
    """os.fork, without Python's warning (since 3.12) about threads: the only ones are those of numpy's OpenBLAS."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(
    connection: socket.socket, launcher: int, modules: Sequence[str], before: Before, expected_threads: int
) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C in a terminal goes to the launcher alone
        bootstrap.die_with(launcher)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        for module in modules:
            with suppress(Exception):  # the rank that needs it says what is wrong
                importlib.import_module(module)
        greeting = {"problem": why_not_with_torch(expected_threads)}
        connection.sendall(json.dumps(greeting).encode() + b"\n")
        taken = preloaded.take_out(before)
        gc.freeze()  # else the first collection in every rank writes to, and so copies, all pages of torch's objects
        stream = connection.makefile("rb")
        for line in stream:
            reader, writer = os.pipe()
            helper = fork()
            if helper == 0:
                stream.close()
                connection.close()
                os.close(reader)
                _fork_ranks(writer, json.loads(line), mask, launcher, taken)
            os.close(writer)
            os.waitpid(helper, 0)  # from here on the ranks are the launcher's
            with open(reader, "rb") as answer:
                connection.sendall(answer.read() or b'{"problem": "the process that forks them has died"}\n')
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
        sys.orig_argv = python_command(bootstrap.__name__, arguments)
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
    """Each rank has random numbers of its own, as a fresh interpreter has; Python's `random` sees to that itself."""
    modules["torch"].default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
