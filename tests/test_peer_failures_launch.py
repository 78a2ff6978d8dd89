"""What went wrong for users of the peer's launcher, by number: the same input here gives the right thing.

The numbers are those of the study of the peer's command line: 2 one process instead of two, 3 eight trainings instead
of an error, 6 a late crash over a number, 14 a missing script, 15 one error in 65 lines, 16 noise without a file.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.cli import main as command_line
from shardkit.launch.environment import rank_variables

EIGHT_GPUS = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "shardkit", "launch", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def refusal(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the words of a launch that is refused, with proof that torch was not needed for them."""
    code = (
        "import sys\nfrom shardkit.cli.main import run\n"
        f"code = run(['launch', *{list(arguments)!r}])\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert "torch was loaded" not in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists()
    return done.returncode, done.stderr


@pytest.mark.slow
def test_2_two_processes_on_the_cpu_are_two(tmp_path):
    (tmp_path / "cpu.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    (tmp_path / "train.py").write_text("import os\nprint('world', os.environ['WORLD_SIZE'])\n")
    done = launch(tmp_path, "--config", "cpu.yaml", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] world 2", "[1] world 2"]


def test_3_more_processes_than_devices_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "shardkit.yaml").write_text(EIGHT_GPUS)
    (tmp_path / "train.py").write_text("print('ran')\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said = refusal(tmp_path, "train.py")
    assert code == 4
    assert "num_processes is 8 but this machine has no GPU; pass --cpu" in said
    assert "1 error. Nothing was started." in said


@pytest.mark.slow
@pytest.mark.parametrize("count", ["0", "-5", "two"])
def test_6_impossible_numbers_are_refused_in_words(tmp_path, count):
    (tmp_path / "train.py").touch()
    code, said = refusal(tmp_path, "--cpu", f"--num-processes={count}", "train.py")
    assert code == 2
    assert "--num-processes: " in said
    assert count in said


def test_6_one_process_of_a_multi_device_type_is_one_process(tmp_path, capsys, monkeypatch):
    (tmp_path / "one.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 1\nuse_cpu: true\n")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["launch", "--config", "one.yaml", "--dry-run", "train.py"]) == 0
    assert "1 machine x 1" in capsys.readouterr().out


def test_14_a_missing_script_is_said_at_once(tmp_path):
    (tmp_path / "train.py").touch()
    code, said = refusal(tmp_path, "--cpu", "-n", "2", "trian.py")
    assert code == 2
    assert said.splitlines()[0] == (
        f"launch: script trian.py does not exist (in {tmp_path.name}/); did you mean train.py?"
    )
    assert len(said.splitlines()) == 2


@pytest.mark.slow
def test_15_one_error_is_few_lines_and_has_its_own_exit_code(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        # Where a rank ends while another one is still connecting to it, gloo itself prints that the connection closed.
        "dist.init_process_group('gloo'); dist.all_reduce(torch.ones(1))\n"
        "def step():\n"
        "    if dist.get_rank() == 1: raise RuntimeError('shape mismatch in layer 3')\n"
        "    dist.all_reduce(torch.ones(1))\n"
        "step()\n"
    )
    done = launch(tmp_path, "--cpu", "-n", "2", "train.py")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) <= 15, done.stderr
    assert sum("shape mismatch" in line for line in lines) == 3  # its line, its words, and the line that names the rank
    assert "launch: rank 1 failed first: RuntimeError: shape mismatch in layer 3 (train.py:4 in step)" in done.stderr
    assert "Connection closed" not in done.stderr


@pytest.mark.slow
def test_16_without_a_file_one_line_says_so(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    done = launch(tmp_path, "--cpu", "-n", "1", "train.py")
    assert done.returncode == 0, done.stderr
    first, last = done.stderr.splitlines()
    assert "| defaults for this machine |" in first
    assert last.startswith("done in ")
    assert done.stdout == "trained\n"


def test_the_strategy_that_was_chosen_is_the_one_that_runs():
    """Number 1 of the same list, where it concerns launching: accelerate drops this answer."""
    from shardkit.config.files import read_text

    text = EIGHT_GPUS.replace("fsdp_version: 2", "fsdp_version: 1\n  fsdp_sharding_strategy: SHARD_GRAD_OP")
    variables = rank_variables(read_text(text).config, "cuda", 8, 8, {})
    assert variables["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == "SHARD_GRAD_OP"
