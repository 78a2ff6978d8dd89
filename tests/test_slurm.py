"""A real SLURM runs what `shardkit submit --to slurm` writes. Needs its programs: `make test-slurm`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.launches import script

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(slurm_cluster.missing() is not None, reason=str(slurm_cluster.missing())),
]
CONFIGURATION = """distributed_type: FSDP
num_machines: 2
num_processes: 4
use_cpu: true
main_process_ip: 10.0.0.1
main_process_port: 29500
"""
SHARDKIT = [sys.executable, "-m", "shardkit"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def folder(tmp_path) -> Path:
    """A project whose folder has a name that a shell would take apart."""
    found = tmp_path / "my $HOME project, %j"
    found.mkdir()
    (found / "shardkit.yaml").write_text(CONFIGURATION)
    (found / "fails.py").write_text(
        "import os, time\ntime.sleep(2 if os.environ['RANK'] == '3' else 600)\nraise ValueError('no')\n"
    )
    return found


def submit(slurm, folder: Path, *words: str) -> str:
    """The number of the job that is started."""
    said = slurm.run(*SHARDKIT, "submit", "--to", "slurm", "--submit", *words, cwd=folder)
    return said.split()[-1]


def losses(path: Path) -> dict[int, float]:
    """By step; no step may have been counted twice."""
    lines = [line.split() for line in (path / "losses.txt").read_text().splitlines()]
    assert len({step for step, _ in lines}) == len(lines)
    return {int(step): float(loss) for step, loss in lines}


def wait_for_steps(path: Path, count: int) -> None:
    until = time.monotonic() + 200
    while not (path / "losses.txt").exists() or len(losses(path)) < count:
        assert time.monotonic() < until, "the job does not train"
        time.sleep(0.2)


def test_a_preempted_job_is_queued_again_and_goes_on(slurm, folder):
    """Two nodes with two ranks each, told to stop in the middle: the losses are those of an uninterrupted run."""
    words = ["it's", "a b", "$HOME", "x;y"]
    number = submit(slurm, folder, "--time", "20m", "--name", "train", script("losses"), "run", "60", "0.3", *words)
    wait_for_steps(folder / "run", 5)
    slurm.run("scancel", "--signal=TERM", number)
    done = slurm.wait_for(number, "COMPLETED", "FAILED")
    screen = (folder / f"train-{number}.log").read_text()
    assert done["JobState"] == "COMPLETED", screen
    assert done["Restarts"] == "1" and "ended with code 75" not in screen
    assert (folder / "run" / "words.txt").read_text() == repr(words)
    assert {path.name for path in (folder / "runs" / f"train-{number}").iterdir()} == {"shardkit.yaml", "0", "1"}
    alone = [*SHARDKIT, "launch", "--cpu", "-n", "4", "--num-machines", "1", "--set", "main_process_ip=null"]
    alone += ["--set", "main_process_port=null", script("losses"), "alone", "60", "0"]
    subprocess.run(alone, cwd=folder, check=True, capture_output=True, timeout=200)
    found, wanted = losses(folder / "run"), losses(folder / "alone")
    assert list(found) == list(wanted) == list(range(1, 61))
    assert found == wanted


def test_a_rank_that_fails_ends_the_job_on_all_nodes(slurm, folder):
    number = submit(slurm, folder, "fails.py")
    done = slurm.wait_for(number, "FAILED", "COMPLETED")
    assert done["ExitCode"] == "1:0" and done["Restarts"] == "0"
    screen = (folder / f"fails-{number}.log").read_text()
    assert "ValueError: no" in screen and "rank 3" in screen
    steps = slurm.run("squeue", "--noheader", "--steps").split()
    assert not steps


def test_a_launcher_that_is_lost_ends_the_job(slurm, folder):
    number = submit(slurm, folder, script("losses"), "run", "100000", "0.2")
    wait_for_steps(folder / "run", 2)
    found = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if is_launcher(path, folder)]
    os.kill(min(found), signal.SIGKILL)  # the ranks that it forked have the same command line
    done = slurm.wait_for(number, "FAILED", "COMPLETED")
    assert done["JobState"] == "FAILED" and done["Restarts"] == "0"


def is_launcher(path: Path, folder: Path) -> bool:
    """Whether a process is the second node's launcher in this folder, or a child of it."""
    try:
        words = path.read_text().split("\0")
        is_second = "SLURM_NODEID=1" in (path.parent / "environ").read_text().split("\0")
        return is_second and words[2:3] == ["launch"] and os.readlink(path.parent / "cwd") == str(folder)
    except OSError:
        return False


def test_sbatch_itself_checks_a_job(slurm, folder):
    slurm.run(*SHARDKIT, "submit", "--to", "slurm", "--check", "fails.py", cwd=folder)
    words = [*SHARDKIT, "submit", "--to", "slurm", "--check", "--option", "partition=none", "fails.py"]
    done = subprocess.run(
        words, env=slurm.environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "invalid partition specified" in done.stderr
