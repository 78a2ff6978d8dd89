"""What a launch is made of, without ranks: lines of output, folders, restarts, the first lines of a rank, bad files."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit import env
from shardkit.cli import main as command_line
from shardkit.config import files
from shardkit.config.schema import Config
from shardkit.errors import EXIT_MACHINE, HangError, MachineError, Preempted, RankFailure
from shardkit.launch import (
    attempts,
    diagnosis,
    folders,
    preflight,
)
from shardkit.launch.diagnosis import RankOutcome
from shardkit.launch.output import Lines, Output
from shardkit.launch.rank_files import ProgressWriter, RankError
from shardkit.launch.restarts import Restarts
from shardkit.launch.spec import launch_spec, rank_command

# output


def test_lines_are_whole_and_bars_are_known():
    lines = Lines()
    assert lines.feed(b"ab") == []
    assert lines.feed(b"c\nde\n\nf") == [("abc", False), ("de", False), ("", False)]
    assert lines.close() == [("f", False)]
    assert lines.feed(b"10%\r") == [] and lines.unfinished() == ("10%", True)  # no prompt, however long it stays
    assert lines.feed(b"20%\r") == []
    assert lines.unfinished() == ("20%", True)
    assert lines.feed(b"100%\nnext\r\n") == [("100%", True), ("next", False)]
    assert lines.feed(b"\xff\xfe\n") == [("\\xff\\xfe", False)]


def test_of_a_line_that_is_very_long_the_beginning_is_taken_between_characters():
    lines = Lines()
    text = "\u20ac" * 500_000
    assert lines.feed(text.encode()[:-1]) == []
    beginning = lines.beginning()
    assert beginning == text[:-1]
    assert lines.beginning() is None
    assert lines.feed(text.encode()[-1:] + b"!\n") == [("\u20ac!", False)]
    assert lines.feed(b"10%\r" * 500_000 + b"20%\r") == []  # a bar: what it was before is over
    assert lines.beginning() is None
    assert lines.unfinished() == ("20%", True)


def test_what_the_screens_encoding_lacks_is_shown_escaped(tmp_path, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    ProgressWriter(tmp_path, 0, 0).post("starting", 0)
    output = Output(tmp_path, tmp_path, 1, 1, None, has_prefix=True)
    (tmp_path / "out-0").write_text("loss \u2193\nend\n", encoding="utf-8")
    output.start()
    output.close()
    assert screen.buffer.getvalue() == b"[0] loss \\u2193\n[0] end\n"


def test_nothing_of_a_progress_bar_stays_behind_the_line_after_it(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen, file = Terminal(), io.StringIO()
    for rank in (0, 1):
        ProgressWriter(tmp_path, rank, rank).post("starting", 0)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", file)
    output = Output(tmp_path, tmp_path, 2, 1, None, has_prefix=True)
    (tmp_path / "err-0").write_text("\r50% and more\r", encoding="utf-8")
    output.start()
    deadline = time.monotonic() + 60
    while "50%" not in screen.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "out-1").write_text("in a file\n", encoding="utf-8")
    (tmp_path / "err-1").write_text("short\n", encoding="utf-8")
    output.close()
    assert file.getvalue() == "[1] in a file\n"
    bar = "[0] 50% and more"
    rest = screen.getvalue().replace(f"{bar}\r{' ' * len(bar)}\r", "")  # it may have been shown again
    assert rest.startswith("[1] short\n")


# folders


def test_folders_for_logs_are_private_and_what_stands_in_the_way_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [folders.make_log_dir(None), folders.make_log_dir(None), folders.make_log_dir("given/deep")]
    assert len(set(made)) == 3
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="log folder file is a file; give another one with --logs DIR"):
        folders.make_log_dir("file")
    (tmp_path / "given" / "config.yaml").symlink_to("/dev/full")
    says = r"log folder given cannot be written \(No space left on device\); give another one with --logs DIR"
    with pytest.raises(MachineError, match=says), folders.writable(Path("given")):
        folders.write(tmp_path / "given" / "config.yaml", "x")


def test_a_log_folder_takes_one_launch_at_a_time(tmp_path):
    code = f"""if 1:
        from pathlib import Path
        from shardkit.launch import folders
        with folders.held(Path({str(tmp_path)!r}), 0): print(flush=True); input()"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        says = rf"log folder .* is in use by another launch \(pid {other.pid} on .*\), and the lines of both"
        with pytest.raises(MachineError, match=says), folders.held(tmp_path, 0):
            pass
        with folders.held(tmp_path, 1):  # another machine of the run
            pass
        other.kill()
    with folders.held(tmp_path, 0):
        pass


def test_a_log_folder_on_a_full_disk_is_told_as_that(tmp_path):
    """It was said that "the output" has no space: the text of the lock file failed again when the file was closed."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, allowed[1]))
    try:
        with pytest.raises(MachineError, match=r"log folder .* cannot be written .*; give another one with --logs DIR"):
            folders.held(tmp_path, 0).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)


def test_launches_of_one_second_have_logs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "runs/now")
    with ThreadPoolExecutor(8) as several:
        made = list(several.map(folders.make_log_dir, [None] * 32))
    assert len(set(made)) == 32


def test_the_temporary_folders_of_killed_launches_are_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from shardkit.launch import folders\nwith folders.temporary() as path: print(path, flush=True); input()"
    words, variables = [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with folders.temporary() as ours:
            assert left.is_dir() and ours.is_dir() and left.parent == ours.parent == tmp_path
        assert not ours.exists()
        other.kill()
    assert left.is_dir()
    (tmp_path / "shardkit-somebody").mkdir()
    with folders.temporary():
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shardkit-somebody"]


# restarts


@pytest.mark.fault_row(38)
def test_restarts_go_on_while_checkpoints_come():
    restarts, cause = Restarts(allowed=10), RankFailure("launch: rank 0 failed first: X\n more", 1)
    for step in (10, 20, 20, 20):
        restarts.saw_checkpoint(step)
        assert restarts.allows(cause)
        restarts.count(cause)
    restarts.saw_checkpoint(20)
    assert not restarts.allows(cause)
    final = restarts.final(cause)
    assert "given up after 4 restarts (3 in a row without a new checkpoint)" in str(final)
    assert str(final).count("rank 0 failed first: X") == 5
    assert final.exit_code == 1


def test_a_restart_is_announced_with_the_whole_cause():
    """An error may have what is wrong in its second line; the table of a hang has the rank that the others wait for."""
    restarts = Restarts(allowed=3)
    outcome = RankOutcome(
        0, exit_code=3, error=RankError(0, "CheckpointError", "not loaded:\n  no file", "", "", 3, False, 5.0)
    )
    report = RankFailure(diagnosis.render(diagnosis.diagnose([outcome]), 0.0, "logs"), 3)
    hang = HangError("launch: HANG, no progress for 6 s\n  rank 0  step 1\n  First to stop: rank 0.")
    for error, cause in (
        (report, "rank 0 failed first: CheckpointError: not loaded:, after 5.0 s.\n      no file"),
        (hang, str(hang).removeprefix("launch: ")),
    ):
        restarts.count(error)
        said = restarts.announcement(error)
        assert said == f"{cause}\nlaunch: restart {restarts.number} of 3, no checkpoint yet"


def test_one_restart_is_counted_as_one():
    restarts, cause = Restarts(allowed=1), RankFailure("launch: rank 0 failed first: X", 1)
    restarts.count(cause)
    assert "given up after 1 restart (all used)" in str(restarts.final(cause))


def test_what_is_not_worth_a_restart():
    restarts = Restarts(allowed=3)
    assert restarts.allows(HangError(""))
    assert not restarts.allows(Preempted(""))
    assert not restarts.allows(RankFailure("", 2))
    assert not Restarts(allowed=0).allows(RankFailure("", 1))


# a rank's first lines


@pytest.mark.fault_row(37)
def test_a_world_of_another_size_stops_before_the_script(tmp_path):
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    variables = {**os.environ, "SHARDKIT_NUM_PROCESSES": "2", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    variables |= {"SHARDKIT_PROGRESS_DIR": str(tmp_path), "SHARDKIT_LOG_DIR": str(tmp_path)}
    bootstrap = rank_command(["script.py"])
    done = subprocess.run(bootstrap, cwd=tmp_path, env=variables, timeout=60, check=False)
    assert done.returncode == 2
    assert not (tmp_path / "ran").exists()
    record = json.loads((tmp_path / "rank-0.error").read_text())
    assert record["message"].startswith("launch: the world size differs from num_processes 2 (got 1)")
    assert record["exit_code"] == 2


def test_a_script_runs_as_python_would_run_it(tmp_path):
    """Also where files in the working folder have the names of modules that a rank loads before the script."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("json", "types", "shardkit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')")
    (scripts / "beside.py").write_text("value = 5\n")
    (scripts / "script.py").write_text(
        "import json, pickle, sys, beside\n"
        "class Thing: pass\n"
        "assert __name__ == '__main__' and __file__.endswith('script.py') and sys.argv == ['scripts/script.py', '-x']\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "assert 'torch' not in sys.modules\n"
        "print(beside.value)\n"
    )
    variables = {**os.environ, "SHARDKIT_PROGRESS_DIR": str(tmp_path), "SHARDKIT_LOG_DIR": str(tmp_path)}
    bootstrap = rank_command(["scripts/script.py", "-x"])
    done = subprocess.run(
        bootstrap, cwd=tmp_path, env=variables, timeout=60, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr + (tmp_path / "rank0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(False)"])
def test_what_a_script_has_begun_on_its_device_is_awaited_and_may_fail(tmp_path, end):
    (tmp_path / "script.py").write_text(
        "import sys, torch\n"
        "from shardkit.distributed import accelerators\n"
        "def fail(): raise torch.AcceleratorError('CUDA error: device-side assert triggered')\n"
        f"torch.accelerator.synchronize, accelerators.is_used = fail, lambda: True\n{end}"
    )
    variables = {**os.environ, "SHARDKIT_PROGRESS_DIR": str(tmp_path), "SHARDKIT_LOG_DIR": str(tmp_path)}
    bootstrap = rank_command(["script.py"])
    done = subprocess.run(bootstrap, cwd=tmp_path, env=variables, timeout=60, check=False)
    assert done.returncode == 1
    assert "device-side assert" in json.loads((tmp_path / "rank-0.error").read_text())["message"]


def test_signals_have_their_exit_codes():
    assert diagnosis.exit_code_of(RankOutcome(0, exit_code=-signal.SIGSEGV)) == 139


# bad files


@pytest.mark.fault_row(25)
@pytest.mark.parametrize(
    "text",
    [
        b"num_procesess: 2\n",
        b"fsdp_config:\n  fsdp_offload_param: true\n",
        b"num_processes: two\n",
        b"num_processes: -5\n",
        b"num_processes: 2\nnum_processes: 3\n",
        b"- 1\n- 2\n",
        b"a:\n\tb: 1\n",
        b"\x00\x01\xff\xfe",
        b"a: &a [1]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]\n",
        b"mixed_precision: fp4\n" * 3,
        b"x" * 2_000_000,
    ],
)
def test_a_bad_file_is_refused_in_few_lines(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "shardkit.yaml").write_bytes(text)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["launch", "--cpu", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "Nothing was started." in said
    assert len(said.splitlines()) <= 13
    assert "shardkit.yaml" in said
    assert not (tmp_path / "runs").exists()


def test_ranks_that_would_fill_the_memory_are_refused():
    machine = preflight.Machine((), 2, 24 * 2**30)
    (problem,) = preflight.memory_problems(Config(num_processes=500, use_cpu=True), machine)
    assert "500 ranks need about 125.0 GiB for Python and torch alone (got 24.0 GiB on this machine)" in problem.text
    assert "--force" in problem.text and problem.exit_code == EXIT_MACHINE
    assert preflight.memory_problems(Config(num_processes=64, use_cpu=True), machine) == []
    assert preflight.memory_problems(Config(num_processes=500, use_cpu=True), preflight.Machine((), 2)) == []


def test_launches_that_share_a_log_folder_keep_their_own_configuration(tmp_path):
    read = {}
    for precision in ("no", "bf16"):
        (own := tmp_path / precision).mkdir()
        spec = launch_spec(Config(mixed_precision=precision), "train.py")
        spec = replace(spec, chosen={"mixed_precision": precision})
        read[precision] = Path(attempts.run_variables(spec, tmp_path, own)[env.RESOLVED])
    for precision, path in read.items():
        assert files.read(path).config.mixed_precision == precision
        assert json.loads(path.with_suffix(".chosen.json").read_text()) == {"mixed_precision": precision}
