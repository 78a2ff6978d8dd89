"""Leaving a process without taking the interpreter down: nothing that was promised is lost."""

import subprocess
import sys

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
