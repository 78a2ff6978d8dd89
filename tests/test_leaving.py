"""Leaving a process without taking the interpreter down: nothing that was promised is lost."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, threading, time
from pathlib import Path
from shardkit.fast_exit import exit_without_torch_teardown

atexit.register(lambda: Path("exit-function").touch())
unflushed = open("unflushed", "w")
unflushed.write("all of it")
started = threading.Event()

def finish():
    started.set()
    Path("thread").touch()

threading.Thread(target=finish).start()
started.wait()
print("last line", end="")
exit_without_torch_teardown(7)
"""


def test_threads_exit_functions_and_files_have_their_end(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, "last line", "")
    assert {path.name for path in tmp_path.iterdir()} == {"exit-function", "thread", "unflushed"}
    assert (tmp_path / "unflushed").read_text() == "all of it"


ENDLESS = """
import atexit, os, signal, sys, threading, time
from shardkit import fast_exit

def interrupt():
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(100)

atexit.register(lambda: print("exit function"))
threading.Thread(target=interrupt).start()
getattr(fast_exit, sys.argv[1])(7)
"""


@pytest.mark.parametrize("leave", ["exit_without_torch_teardown", "exit_without_interpreter_teardown"])
def test_ctrl_c_ends_the_wait_for_a_thread_and_keeps_the_code(tmp_path, leave):
    """As in Python. A script that had ended well had failed without an exception."""
    words = [sys.executable, "-c", ENDLESS, leave]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "exit function\n"), done.stderr
    assert "KeyboardInterrupt" in done.stderr
