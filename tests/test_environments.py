"""Launches in odd but ordinary surroundings: a parent that ignores signals, no space for temporary files, scripts that
are not plain files."""

import errno
import io
import os
import pwd
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest

import shardkit
from shardkit import open_files
from shardkit.cli import main as command_line
from shardkit.config import files, hardware
from shardkit.errors import EXIT_MACHINE, MachineError
from shardkit.launch import bootstrap, diagnosis, failure, folders, preflight, processes, rank_files
from shardkit.launch.diagnosis import RankOutcome
from shardkit.launch.output import Output
from shardkit.wizard import draft

TIMEOUT_S = 120

FAILS = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("boom")
time.sleep(600)
"""

WAITS = """
import time
print("up", flush=True)
time.sleep(600)
"""

PARENT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR2])
os.execv(sys.executable, [sys.executable, "-m", "shardkit", "launch", "--cpu", "-n", "2", *sys.argv[1:]])
"""
"""A parent that ignores and blocks signals, and becomes a launch."""


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """A launch of 2 ranks by these words after `python`, to its end."""
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


# the parent


@pytest.mark.slow
def test_a_rank_that_fails_is_told_where_the_parent_ignores_the_end_of_children(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    done = launch(tmp_path, "-c", PARENT, "--start", "exec", "fails.py")
    assert done.returncode == 1, done.stderr
    assert "rank 1 failed first: ValueError: boom" in done.stderr


@pytest.mark.slow
def test_a_signal_that_the_parent_ignored_and_blocked_ends_the_ranks(tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    words = [sys.executable, "-c", PARENT, "--start", "fork", "waits.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any("up" in line for line in iter(process.stdout.readline, ""))
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "SIGTERM ended the ranks" in said


OUTER = """
import os, subprocess, sys
subprocess.run([sys.executable, "-m", "shardkit", "launch", "--cpu", "-n", "1", "inner.py"], check=True)
"""

INNER = """
import os
names = "SHARDKIT_MEASURE", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"
print("inner", [os.environ.get(name) for name in names], os.environ["ACCELERATE_MIXED_PRECISION"])
"""


@pytest.mark.slow
def test_a_launch_in_a_rank_has_settings_of_its_own(tmp_path):
    """ACCELERATE_GRADIENT_ACCUMULATION_STEPS outranks what a script on Accelerate says."""
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text(INNER)
    settings = ["--set", "debug=true", "--set", "shardkit.gradient_accumulation_steps=4", "--mixed-precision", "bf16"]
    flags = ["--cpu", "-n", "1", "--measure", *settings]
    done = launch(tmp_path, "-m", "shardkit", "launch", *flags, "outer.py")
    assert "inner [None, None, None, ''] no" in done.stdout, done.stdout + done.stderr


# temporary files


def test_a_temporary_folder_without_space_is_told_before_ranks_start(monkeypatch):
    monkeypatch.setattr(folders, "SPACE_BYTES", 1 << 60)
    says = r"the temporary folder .* cannot be used \(.*\); free some space there"
    with pytest.raises(MachineError, match=says), folders.temporary():
        pass


def test_a_temporary_folder_without_pipes_is_told_before_ranks_start(monkeypatch):
    def refuse(path, mode=0o666):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(path))

    monkeypatch.setattr(os, "mkfifo", refuse)
    says = r"cannot be used \(Operation not supported\); .* set TMPDIR to a folder on another disk"
    with pytest.raises(MachineError, match=says), folders.temporary():
        pass


def test_no_temporary_folder_at_all_is_no_bug(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    monkeypatch.setattr(command_line, "_answer", lambda verb, arguments: tempfile.gettempdir())
    assert command_line.run(["launch"]) == EXIT_MACHINE
    assert "set TMPDIR to a folder that can be written" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="another limit")
def test_a_folder_too_long_for_sockets_is_told(tmp_path):
    longest = str(tmp_path / "x")
    longest += "x" * (preflight.SOCKET_FOLDER_BYTES - len(longest))
    for folder, is_short in ((longest, True), (f"{longest}x", False)):
        Path(folder, "pymp-12345678").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as made:
            try:
                made.bind(f"{folder}/pymp-12345678/listener-12345678")
            except OSError:
                assert not is_short
        assert (preflight.socket_warning(folder) is None) == is_short


# limits of the job


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/slurm/job_7/step\n", {"slurm/job_7/memory.max": "1073741824", "slurm/job_7/cpu.max": "100000 100000"}),
        (
            "4:memory:/docker/ab\n2:cpu,cpuacct:/docker/ab\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "1073741824",  # the path of the host is not visible in the container
                "cpu/docker/ab/cpu.cfs_quota_us": "50000",
                "cpu/docker/ab/cpu.cfs_period_us": "100000",
            },
        ),
        ("0::/../other\n", {"memory.max": "1073741824", "cpu.max": "100000 100000"}),
    ],
)
def test_limits_of_every_control_group_above_count(tmp_path, monkeypatch, own, files):
    for name, text in {**files, "cgroup": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "cgroup")
    found = hardware.detect()
    assert (found.memory_bytes, found.cores) == (2**30, 1)


@pytest.mark.parametrize("name", ["memory/job/step/memory.oom_control", "job/step/memory.events", "memory.events"])
def test_what_the_kernel_has_ended_for_lack_of_memory_is_counted(tmp_path, monkeypatch, name):
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "_OWN_GROUPS", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text("4:memory:/job/step\n0::/job/step\n")
    assert hardware.memory_kills() == 0
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("oom_kill_disable 0\noom 5\noom_kill 3\n")
    assert hardware.memory_kills() == 3


# the script


@pytest.mark.slow
def test_a_zip_file_runs_as_python_would_run_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # Python adds what it runs all the same
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import inside, sys\nprint(inside.word, sys.argv[1:])\n")
        archive.writestr("inside.py", "word = 'zipped'\n")
    done = launch(tmp_path, "-m", "shardkit", "launch", "--cpu", "-n", "2", "app.zip", "--x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] zipped ['--x']", "[1] zipped ['--x']"]


def test_what_is_no_python_script_is_told_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text("#!/usr/bin/env bash\npython train.py\n")
    Path("pip-wrote-this").write_text("#!/bin/sh\n'''exec' /a/python \"$0\" \"$@\"\n' '''\n")
    Path("train.py").write_text("#!/usr/bin/env python\n")
    Path("own").mkdir()
    Path("own", "b.py").touch()

    def says(script: str, is_module: bool = False) -> str:
        return "".join(problem.text for problem in preflight.script_problems(script, is_module))

    assert "(its first line is #!/usr/bin/env bash); give the Python script" in says("run.sh")
    assert "it is a binary file" in says(sys.executable)
    for stream in ("-", "/dev/stdin", "/dev/fd/63"):
        assert "is a stream, which only one rank could read" in says(stream)
    assert "-m needs the name of a module (got the file own/b.py)" in says("own/b.py", is_module=True)
    assert says("train.py") == says("pip-wrote-this") == ""


@pytest.mark.parametrize(("given", "code"), [(True, 1), (300, 44), (-1, 255), (None, 0), ("text", 1)])
def test_the_exit_code_is_the_one_that_the_shell_sees(given, code):
    found = failure.exit_code_of(SystemExit(given))
    assert (found, type(found)) == (code, int)


# the rank's end


def test_a_full_shared_memory_is_told_with_what_to_do():
    try:
        raise OSError(28, "No space left on device")
    except OSError as error:
        told = diagnosis.diagnose([RankOutcome(0, exit_code=1, error=failure.describe(0, error, set()))])
    assert "docker run --shm-size=16g" in diagnosis.render(told, 0.0, "logs")


def test_the_excepthook_of_the_script_learns_of_the_error(tmp_path, monkeypatch, capsys):
    told = []

    def hook(kind, error, trace):
        told.append((kind, error))
        print("from the hook", file=sys.stderr)

    error = ValueError("boom")
    monkeypatch.setattr(sys, "excepthook", hook)
    with open(tmp_path / "log", "wb", buffering=0) as log:
        assert bootstrap.report(tmp_path, 0, error, log) == 1
        assert bootstrap.report(tmp_path, 0, SystemExit(2), log) == 2
    assert told == [(ValueError, error)]
    assert "from the hook" in (tmp_path / "log").read_text()
    assert capsys.readouterr().err == ""


def test_an_error_that_cannot_be_reported_is_printed(tmp_path, capsys):
    assert bootstrap.report(tmp_path / "gone", 0, ValueError("boom"), io.BytesIO()) == 1
    said = capsys.readouterr().err
    assert "ValueError: boom" in said
    assert "the error above could not be reported" in said


def test_lines_without_end_of_several_ranks_are_shown_once(tmp_path, capsys):
    for rank in range(2):
        rank_files.ProgressWriter(tmp_path, rank, rank).post("starting", 0, is_watched=False)
    output = Output(tmp_path, tmp_path, 2, 1, None, True)
    output.start()
    for rank in range(2):
        with open(tmp_path / f"out-{rank}", "w") as pipe:
            pipe.write("no newline")
    said, until = "", time.monotonic() + TIMEOUT_S
    while said.count("no newline") < 2 and time.monotonic() < until:
        time.sleep(0.02)
        said += capsys.readouterr().out
    output.close()
    said += capsys.readouterr().out
    assert said.splitlines() in (["[0] no newline", "[1] no newline"], ["[1] no newline", "[0] no newline"])


# the folders of a user


def test_a_deleted_folder_an_unreadable_path_and_a_narrow_locale_are_no_bugs(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert command_line.run(["launch", "--cpu", "train.py"]) == EXIT_MACHINE
    finally:
        monkeypatch.undo()
    assert "the working folder was deleted; change to another one" in capsys.readouterr().err
    assert command_line.run(["launch", "--cpu", "x" * 300]) == EXIT_MACHINE
    assert "File name too long; choose a shorter path" in capsys.readouterr().err
    monkeypatch.setattr(command_line, "_answer", lambda verb, arguments: "ü".encode("ascii"))
    assert command_line.run(["launch"]) == EXIT_MACHINE
    assert "('ü' is not in ascii); set PYTHONUTF8=1" in capsys.readouterr().err


def test_a_user_without_a_home_folder_writes_a_configuration(tmp_path, monkeypatch, capsys):
    """As in a container whose user is not in /etc/passwd."""

    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME", raising=False)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    draft.keep(tmp_path / "shardkit.yaml", {"mixed_precision": "bf16"})
    assert draft.find(tmp_path / "shardkit.yaml") is None
    draft.discard(tmp_path / "shardkit.yaml")
    monkeypatch.setenv("HF_HOME", "x" * 300)  # a place that cannot be looked at, as the home folder of another user
    assert files.accelerates_own() is None
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["config", "--defaults"]) == 0, capsys.readouterr().err
    assert Path("shardkit.yaml").is_file()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_late_signal_does_not_change_the_exit_code(number):
    code = (
        "import os, signal, sys; from shardkit.cli import main; sys.modules['torch'] = None; main.run = lambda _: 75;"
        f"main.exit_without_torch_teardown = lambda _: os.kill(os.getpid(), signal.{number});"
        "main.main()"
    )
    done = launch(Path.cwd(), "-c", code)
    assert (done.returncode, done.stderr) == (75, "")


def test_a_limit_of_processes_is_no_bug():
    code = (
        "import resource, sys; from shardkit.cli import main; resource.setrlimit(resource.RLIMIT_NPROC, (0, 0));"
        "import os, threading; os.getuid() or os.setuid(54321); main._answer = lambda *_: threading.Thread().start();"
        "main.main(['launch'])"
    )
    done = launch(Path.cwd(), "-c", code)
    assert done.returncode == EXIT_MACHINE, done.stderr
    assert "raise the limits: ulimit -u" in done.stderr


def launch_with_files(folder: Path, soft: int, hard: int | None) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    code = (
        "import resource; from shardkit.cli.main import main; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard} or hard));"
        "main(['launch', '--cpu', '-n', '2', 'train.py'])"
    )
    return launch(folder, "-c", code)


def test_windows_is_refused_by_every_verb_and_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    assert command_line.run(["env"]) == EXIT_MACHINE
    assert "got Windows" in capsys.readouterr().err
    with pytest.raises(MachineError, match="on Windows use WSL 2"):
        _ = shardkit.Accelerator


def test_the_exit_of_a_rank_is_noticed_on_a_system_without_waitid(monkeypatch):
    """Such as macOS before Python 3.13."""
    monkeypatch.delattr("os.waitid")
    child = subprocess.Popen(["sleep", "60"])
    assert processes.exit_code(child.pid) is None
    child.kill()
    child.wait()
    with pytest.raises(ChildProcessError):
        processes.exit_code(child.pid)


def test_the_limit_of_open_files_is_raised_where_the_system_allows_no_more_than_macos(monkeypatch):
    limits = [(256, resource.RLIM_INFINITY)]

    def set_limit(kind, wanted):
        if wanted[0] > 10240:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    open_files.allow(1000, "a rank needs")
    assert limits[-1] == (10240, resource.RLIM_INFINITY)


def test_too_few_open_files_for_the_launcher_are_told_before_its_store_stops_answering(tmp_path):
    done = launch_with_files(tmp_path, 24, 24)
    assert done.returncode == EXIT_MACHINE, done.stderr
    assert "the launcher of 2 ranks needs about 44 open files (got a limit of 24); raise it: ulimit" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_launchers_limit_of_open_files_is_raised(tmp_path):
    done = launch_with_files(tmp_path, 24, None)
    assert done.returncode == 0, done.stderr
    assert {int(line.split()[1]) >= 44 for line in done.stdout.splitlines()} == {True}


# files of the working folder with names of Python's own modules


SRUN = """#!/bin/bash
export SLURM_NODEID=0 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
while [[ $1 == -* ]]; do shift; done
exec "$@"
"""


@pytest.fixture
def folder_of_namesakes(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("json", "types", "random", "glob", "logging"):
        (folder / f"{name}.py").write_text("raise SystemExit('of the working folder')")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--model", "models:build", "--world", "2"],
        ["plan", "--model", "gpt:layers=2,hidden=64,heads=2", "--world", "2", "--batch-size", "1", "--simulate"],
        ["doctor", "--cpu"],
    ],
)
def test_a_process_of_a_command_imports_pythons_own_modules(folder_of_namesakes, words):
    (folder_of_namesakes / "models.py").write_text("from torch import nn\ndef build(): return nn.Linear(8, 8)\n")
    program = [sys.executable, str(Path(shardkit.__file__).with_name("__main__.py"))]
    done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_job_imports_pythons_own_modules(folder_of_namesakes, monkeypatch, tmp_path):
    """The launch of a job, which starts in the project's folder."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    (folder_of_namesakes / "train.py").write_text("print('trained')\n")
    flags = ["--to", "slurm", "--set", "use_cpu=true", "-n", "1", "-o", "job.sh"]
    assert command_line.run(["submit", *flags, "train.py"]) == 0
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    done = subprocess.run(
        ["bash", "job.sh"], env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0 and "trained" in done.stdout, done.stdout + done.stderr


def test_python_m_shardkit_imports_pythons_own_modules(folder_of_namesakes):
    (folder_of_namesakes / "types.py").unlink()  # Python itself imports it, to find the module of -m
    command = [sys.executable, "-m", "shardkit", "config", "show", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
