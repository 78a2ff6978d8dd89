"""The end of a process that has loaded torch, without taking down the interpreter: that takes a quarter of a second,
and does nothing that the system would not do."""

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
from typing import NoReturn


def exit_without_torch_teardown(code: int) -> NoReturn:
    """Ends the process as Python would, but for the interpreter and for what native libraries do at the end."""
    _end_python()
    _flush()
    os._exit(code)


def exit_without_interpreter_teardown(code: int) -> NoReturn:
    """As above, with what native libraries do at the end: profilers write their files then.

    The script's own objects are finalized, as they are when Python takes down `__main__`.
    """
    _end_python()
    _flush()  # first: a file that is collected as part of a cycle may lose what it holds (python/cpython#62052)
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush()
    ctypes.PyDLL(None).exit(code)
    raise AssertionError("exit() returned")


def _end_python() -> None:
    """Threads awaited, exit functions called."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _flush() -> None:
    """What open files still hold is written."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()
