"""How ranks start: forked from a process that has loaded torch, they are what fresh ones are."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shardkit.errors import RankFailure
from shardkit.launch import forking, names, pod, preloaded, signals, start_methods
from shardkit.launch.monitor import Monitor
from shardkit.launch.rank_files import read_errors
from shardkit.launch.spec import rank_command

SCRIPTS = Path(__file__).parent / "scripts"
is_slow = pytest.mark.slow


def launch(folder: Path, *arguments: str, options: tuple[str, ...] = (), **variables: str):
    """A launch on the CPU from `folder`, to its end; `options` are Python's."""
    command = [sys.executable, *options, "-m", "shardkit", "launch", "--cpu", "--no-prefix", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, input="in\n"
    )


# what a forked rank is


def portrait(folder: Path, start: str) -> dict:
    options = ("-X", "dev", "-W", "default")
    shown = ("-n", "2", "--start", start, "--show", "0")
    done = launch(folder, *shown, str(SCRIPTS / "self_portrait.py"), "--lr", "1", options=options)
    assert done.returncode == 0 and "ResourceWarning" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    for changing in ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", names.LAUNCHED):
        found["variables"].pop(changing, None)
    return found


@is_slow
def test_a_forked_rank_is_what_a_fresh_one_is(tmp_path):
    fresh, forked = portrait(tmp_path, "exec"), portrait(tmp_path, "fork")
    for name, value in fresh.items():
        assert forked[name] == value, name


KILLED = """
import os, signal, torch
from torch.utils.data import DataLoader
for batch in DataLoader(torch.arange(8), num_workers=1):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@is_slow
@pytest.mark.parametrize("start", ["exec", "fork"])
def test_ranks_that_are_killed_leave_no_temporary_files(tmp_path, start):
    (tmp_path / "train.py").write_text(KILLED)
    with tempfile.TemporaryDirectory() as place:  # a short path, as sockets need
        done = launch(tmp_path, "-n", "1", "--start", start, "train.py", TMPDIR=place)
        assert done.returncode == 137, done.stderr
        assert not os.listdir(place)


RANDOM = """
import random, os, uuid
import numpy, torch
from pathlib import Path
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(), str(uuid.uuid4())]
Path(os.environ["RANK"]).write_text(repr(drawn))
"""


@is_slow
def test_forked_ranks_draw_different_random_numbers(tmp_path):
    (tmp_path / "draw.py").write_text(RANDOM)
    done = launch(tmp_path, "-n", "2", "--start", "fork", "draw.py")
    assert done.returncode == 0, done.stderr
    one, other = (eval((tmp_path / rank).read_text()) for rank in "01")
    assert all(mine != yours for mine, yours in zip(one, other, strict=True))


KILLS_ITS_KIN = """
import os, signal, time
from pathlib import Path
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(1)  # the launcher is yet to be told that this rank was forked
    launcher = os.getppid()
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if int(pid) != os.getpid():
            os.kill(int(pid), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
print("again")
"""


@is_slow
def test_ranks_restart_where_what_they_are_forked_from_was_killed_with_them(tmp_path):
    """As by `pkill -9 -f train.py`, or by the kernel when memory runs out."""
    (tmp_path / "killed.py").write_text(KILLS_ITS_KIN)
    done = launch(tmp_path, "-n", "1", "--restarts", "1", "killed.py")
    assert (done.returncode, done.stdout) == (0, "again\n"), done.stderr
    assert "killed by SIGKILL" in done.stderr


@is_slow
def test_a_variable_that_torch_reads_takes_effect_wherever_it_is_set(tmp_path):
    package = tmp_path / "elsewhere" / "installed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n")
    (tmp_path / "threads.py").write_text("import installed\nimport torch\nprint('threads', torch.get_num_threads())\n")
    for start in ("exec", "fork"):
        done = launch(
            tmp_path, "-n", "1", "--start", start, "threads.py", PYTHONPATH=str(package.parent), OMP_NUM_THREADS="2"
        )
        assert done.stdout == "threads 1\n", done.stderr


END = """
import atexit, sys, threading, time
import torch
from pathlib import Path

class Held:
    def __del__(self):
        Path("finalized").touch()

atexit.register(lambda: Path("exit-function").touch())
held = Held()
unflushed = open("unflushed", "w")
unflushed.write("all of it")
threading.Thread(target=lambda: (time.sleep(0.2), Path("thread").touch())).start()
print("last", end="")
sys.exit(5)
"""


@is_slow
def test_a_forked_rank_has_its_end(tmp_path):
    (tmp_path / "end.py").write_text(END)
    done = launch(tmp_path, "-n", "1", "--start", "fork", "end.py")
    assert (done.returncode, done.stdout) == (5, "last\n"), done.stderr
    assert (tmp_path / "unflushed").read_text() == "all of it"
    assert {"finalized", "exit-function", "thread"} <= {path.name for path in tmp_path.iterdir()}


# where ranks are not forked


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'", ["OMP_NUM_THREADS"]),
        ('os.environ.setdefault("PYTORCH_ALLOC_CONF", "x")', ["PYTORCH_ALLOC_CONF"]),
        ("os.environ.update(MKL_NUM_THREADS='1', RANK='0')", ["MKL_NUM_THREADS"]),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['TORCH_HOME'] = '0'", []),
        ("TORCH_DTYPE = 'OMP_NUM_THREADSX' if False else os.environ['RANK']", ["OMP_NUM_THREADSX"]),
    ],
)
def test_variables_are_found_in_the_script_and_in_what_it_imports(tmp_path, monkeypatch, line, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "settings.py").write_text(f"import os\n{line}\n")
    (tmp_path / "inner" / "model.py").write_text("from .settings import a\nimport train\n")
    (tmp_path / "train.py").write_text("import os, sys\nfrom inner.model import b\nimport json\n")
    assert preloaded.variables_set("train.py", False) == names
    assert preloaded.variables_set("inner.model", True) == names
    assert preloaded.variables_set("no.such", True) == []


def test_a_module_beside_the_script_that_torch_has_loaded_under_its_name_is_found(tmp_path):
    (tmp_path / "json.py").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "logging").mkdir()  # data, no package
    assert forking.hidden_by(tmp_path) == ["json.py"]
    assert forking.hidden_by(Path(json.__file__).parent.parent / "nowhere") == []
    assert "json" not in " ".join(forking.hidden_by(Path(json.__file__).parent.parent))  # it is the one that is loaded


@is_slow
def test_a_fork_that_was_asked_for_and_cannot_be_is_refused(tmp_path):
    (tmp_path / "train.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    done = launch(tmp_path, "--start", "fork", "train.py")
    assert done.returncode == 4, done.stderr
    assert (
        "launch: start: the ranks cannot be forked: train.py or a module next to it sets OMP_NUM_THREADS" in done.stderr
    )
    assert launch(tmp_path, "-n", "1", "train.py").returncode == 0


def test_what_a_library_has_opened_or_started_is_found():
    assert forking.why_not_with_torch(forking.count_threads()) is None
    assert "has started threads" in (forking.why_not_with_torch(forking.count_threads() - 1) or "")


# signals while processes start


def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen]:
    """The processes that are started from now on; a SIGTERM comes before the second start has returned."""
    started: list[subprocess.Popen] = []
    popen = subprocess.Popen.__init__

    def told(self, *args, **options):
        popen(self, *args, **options)
        started.append(self)
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess.Popen, "__init__", told)
    return started


def test_a_signal_while_ranks_start_leaves_none_of_them(monkeypatch):
    def end_it(number, frame):
        raise RankFailure("told", 143)

    started = interrupted(monkeypatch)
    with signals.handled([signal.SIGTERM], end_it), pytest.raises(RankFailure):
        start_methods.start_each(["sleep", "60"], [{}] * 3)
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_signal_while_the_commands_of_a_pod_start_ends_them(monkeypatch):
    started = interrupted(monkeypatch)
    with pytest.raises(RankFailure, match="SIGTERM ended the commands of all machines"):
        pod.run([["sleep", "60"]] * 3)
    assert [process.returncode for process in started] == [-signal.SIGTERM] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_the_machine_of_a_pod_that_failed_is_named_not_one_that_was_ended(ends, code):
    with pytest.raises(RankFailure, match=rf"machine 1 failed \(got exit code {code}\)") as failed:
        pod.run([["sleep", "60"], ["sh", "-c", ends]])
    assert failed.value.exit_code == code


@is_slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ranks_are_forked_is_for_them(tmp_path, number):
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    code = (
        "import os, sys\n"
        "from shardkit.launch import forking\n"
        "read = forking.Template._read\n"
        "def told(self):\n"
        "    answer = read(self)\n"
        f"    'pids' in answer and os.kill(os.getpid(), {int(number)})\n"
        "    return answer\n"
        "forking.Template._read = told\n"
        "from shardkit.cli.main import main\n"
        "main()"
    )
    words = [sys.executable, "-c", code, "launch", "--cpu", "-n", "2", "--start", "fork", "sleeps.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + number, done.stderr
    assert "Traceback" not in done.stderr + done.stdout


RANK = """
import signal, sys, time
from pathlib import Path
from shardkit.launch import rank_files
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: sys.exit())
rank_files.ProgressWriter(Path(sys.argv[1]), 0, 0).post("starting", 0)
print("up", flush=True)
while True:
    time.sleep(0.01)
"""


def test_a_rank_that_has_just_started_is_told_once(tmp_path):
    watch = Monitor(tmp_path, tmp_path, 0, 60, print)
    with subprocess.Popen([sys.executable, "-c", RANK, tmp_path], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "up\n"
        watch.tell_to_stop(signal.SIGTERM)
        assert rank.stdout.readline() == "told\n"
        watch.start()
        watch.close()
        rank.send_signal(signal.SIGUSR1)
        assert rank.communicate(timeout=60)[0] == "" and watch.ranks[0].progress.pid == rank.pid


@pytest.mark.parametrize("end", ["raise RuntimeError('of the child')", "sys.exit('of the child')"])
def test_the_end_of_a_process_that_the_script_has_forked_is_not_that_of_the_rank(tmp_path, end):
    lines = ["import os, sys", "child = os.fork()", f"if not child: {end}"]
    lines += ["sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 4)"]
    (tmp_path / "forks.py").write_text("\n".join(lines))
    variables = {names.PROGRESS_DIR: str(tmp_path), names.LOG_DIR: str(tmp_path), "RANK": "3"}
    command = rank_command([str(tmp_path / "forks.py")])
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 5 and "of the child" in done.stderr and "bootstrap.py" not in done.stderr, done.stderr
    assert read_errors(tmp_path)[3].message == "the script called sys.exit(5)"
    assert "of the child" not in names.log_path(tmp_path, 3).read_text()


# what a rank starts

STARTS = """
import os, subprocess, sys
from shardkit import Accelerator

accelerator = Accelerator()
if accelerator.is_main_process:
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launched = [sys.executable, "-m", "shardkit", "launch", "-n", "1", "--cpu", "child.py"]
    for command, variables in ((["child.py"], None), (["child.py"], others), (launched[1:], None)):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60, env=variables)
        print((done.stdout + done.stderr).strip().splitlines())
accelerator.wait_for_everyone()
"""
CHILD = """
from shardkit import Accelerator

print("ranks:", Accelerator(cpu=True).num_processes)
"""


@is_slow
def test_a_script_that_a_rank_starts_does_not_wait_for_the_ranks_of_its_run(tmp_path):
    (tmp_path / "parent.py").write_text(STARTS)
    (tmp_path / "child.py").write_text(CHILD)
    done = launch(tmp_path, "-n", "2", "--show", "0", "parent.py")
    assert done.returncode == 0, done.stderr
    refused, without, launched = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert "Accelerator: this process was started by rank 0 of a run (process" in refused
    assert "start it by: shardkit launch -n 1 child.py, or without these variables." in refused
    assert "ranks: 1" in without and "ranks: 1" in launched


SPAWNS = """
import os, sys
import torch.multiprocessing as mp
from shardkit import Accelerator

def main(rank):
    if sys.argv[2:] == ["world"]:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29517")
    accelerator = Accelerator(cpu=True)
    print("ranks:", accelerator.num_processes)

if __name__ == "__main__":
    if sys.argv[2:] == ["trains"]:
        accelerator = Accelerator(cpu=True)
    mp.start_processes(main, nprocs=2, start_method=sys.argv[1])
"""


@is_slow
@pytest.mark.parametrize(
    ("ranks", "arguments"), [("2", ["fork"]), ("2", ["spawn"]), ("1", ["fork"]), ("2", ["fork", "world"])]
)
def test_a_script_that_spawns_its_own_ranks_is_told_that_launch_does(tmp_path, ranks, arguments):
    """Those of one rank each took themselves for it: they waited without end, or each trained alone."""
    (tmp_path / "own ranks.py").write_text(SPAWNS)
    done = launch(tmp_path, "-n", ranks, "own ranks.py", *arguments)
    assert done.returncode == 1 and "ranks:" not in done.stdout
    assert "note: the script calls mp.start_processes, and launch starts the ranks already: call its" in done.stderr
    assert "has started this process with multiprocessing (got a child of process" in done.stderr
    remedy = "call its function directly, since launch starts the ranks: shardkit launch -n 2 'own ranks.py'"
    assert remedy in done.stderr.partition("failed first")[2], done.stderr


@is_slow
def test_a_process_of_a_rank_that_is_alone_may_be_a_run_of_its_own(tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)
    done = launch(tmp_path, "-n", "1", "spawns.py", "fork", "trains")
    assert (done.returncode, done.stdout) == (0, "ranks: 1\nranks: 1\n"), done.stderr


WRAPS = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "child.py"]).returncode)
"""


@is_slow
def test_a_rank_may_run_the_script_as_a_program_in_its_place(tmp_path):
    (tmp_path / "wraps.py").write_text(WRAPS)
    (tmp_path / "child.py").write_text(CHILD)
    done = launch(tmp_path, "-n", "2", "wraps.py")
    assert (done.returncode, done.stdout) == (0, "ranks: 2\nranks: 2\n"), done.stderr


ELASTIC = """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from shardkit import Accelerator

def main():
    return Accelerator(cpu=True).num_processes

if __name__ == "__main__":
    start = LaunchConfig(1, 1, 2, run_id="own", rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    print("ranks:", elastic_launch(start, main)()[0])
"""


@is_slow
def test_torch_elastic_in_a_rank_starts_a_world_of_its_own(tmp_path):
    (tmp_path / "elastic.py").write_text(ELASTIC)
    done = launch(tmp_path, "elastic.py")
    assert done.returncode == 0 and "ranks: 2" in done.stdout, done.stderr
