"""Fast exit of a process that has loaded torch, without interpreter teardown, which takes a quarter of a second."""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
import traceback
from typing import NoReturn


def exit_without_torch_teardown(code: int) -> NoReturn:
    """Ends the process without interpreter teardown and without exit handlers of native libraries."""
    _end_python()
    _flush()
    os._exit(code)


def exit_without_interpreter_teardown(code: int) -> NoReturn:
    """As above, but with exit handlers of native libraries: profilers write their files there.

    The script's objects are finalized, as in Python's teardown of `__main__`.
    """
    _end_python()
    _flush()  # first: a file collected as part of a cycle may lose its buffer (python/cpython#62052)
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush()
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("exit() returned")


def _end_python() -> None:
    """Joins threads and calls exit functions. As in Python, Ctrl-C ends the wait for threads, and changes no code."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()


def _flush() -> None:
    """Flushes all open files."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
