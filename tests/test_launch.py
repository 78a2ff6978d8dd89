"""`shardkit launch` itself, as a subprocess: ranks, logs, failures, hangs, signals, restarts."""

import os
import re
import signal
import subprocess

import pytest

from tests.launches import TIMEOUT_S, command, free_port, launch, logs, running, script, wait_for_files, wait_until_gone

pytestmark = pytest.mark.slow


@pytest.mark.requirement("D2")
@pytest.mark.requirement("B2")
@pytest.mark.requirement("A11")
def test_a_launch_reads_the_file_that_it_finds_and_starts_its_ranks(tmp_path):
    (tmp_path / "shardkit.yaml").write_text("num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n")
    done = launch(tmp_path, script("world"), "--lr", "3e-4", "-n", "7")
    assert done.returncode == 0, done.stderr
    expected = {f"[{rank}] rank {rank} of 2, sum 3, ['--lr', '3e-4', '-n', '7']" for rank in (0, 1)}
    assert set(done.stdout.splitlines()) == expected
    first, *_, last = done.stderr.splitlines()
    assert re.search(
        r"^shardkit \S+ \| .*shardkit.yaml \| FSDP FULL_SHARD, bf16 \| 1 machine x 2 \| torch .* gloo", first
    )
    assert re.search(r"^done in .*, 2 ranks, exit 0$", last)
    assert "[1] config config.yaml" in done.stderr
    assert (logs(tmp_path) / "rank1.log").read_text().splitlines()[0].startswith("rank 1 of 2")


def test_a_launch_whose_streams_are_closed_keeps_their_numbers_free_of_files(tmp_path):
    words = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", *command("-n", "2", script("world"))]
    done = subprocess.run(words, cwd=tmp_path, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0
    assert (logs(tmp_path) / "rank1.log").read_text().splitlines()[0].startswith("rank 1 of 2, sum 3")


@pytest.mark.parametrize("lines", ["", "Accelerator()"])
def test_a_script_without_an_accelerator_is_told_at_the_end_that_the_strategy_had_no_effect(tmp_path, lines):
    (tmp_path / "train.py").write_text(f"from shardkit import Accelerator\n{lines}\n")
    done = launch(tmp_path, "--num-processes", "2", "--mixed-precision", "bf16", "train.py")
    assert done.returncode == 0, done.stderr
    said = "warning: the script made no Accelerator, so FSDP FULL_SHARD and bf16 had no effect, and each rank's model"
    assert (said in done.stderr) == (not lines)
    asked = launch(tmp_path, "--num-processes", "2", "train.py", "--help")
    assert (asked.returncode, "warning" in asked.stderr) == (0, False)


@pytest.mark.parametrize(("arguments", "words"), [("--cpu --lr 1 -n=2", "--cpu -n=2"), ("--rate 1", "")])
def test_a_script_that_refuses_options_of_launch_is_told_with_where_they_go(tmp_path, arguments, words):
    parser = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_args()\n"
    (tmp_path / "train.py").write_text(parser)
    done = launch(tmp_path, "--cpu", "-n", "1", "train.py", *arguments.split())
    assert done.returncode == 2
    said = f"\n  options  the script got {words}; options of launch go before the script\n"
    assert done.stderr.endswith(said) if words else "options  the script" not in done.stderr


def test_a_module_keeps_its_own_options_and_one_rank_has_no_prefix(tmp_path):
    (tmp_path / "tool.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    done = launch(tmp_path, "-n", "1", "-m", "tool", "--show", "x", "-n", "3")
    assert (done.returncode, done.stdout) == (0, "__main__ ['--show', 'x', '-n', '3']\n"), done.stderr


def test_only_the_shown_ranks_reach_the_screen_and_bars_come_from_rank_0(tmp_path):
    bar = "for i in range(3): print(f'{r} at {i}', end='\\r')"
    (tmp_path / "bar.py").write_text(f"import os\nr = os.environ['RANK']\n{bar}\nprint()\nprint('end', r)")
    done = launch(tmp_path, "-n", "3", "--show", "0,1", "bar.py")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 at 2", "[0] end 0", "[1] end 1"], done.stderr
    assert "end 2" in (logs(tmp_path) / "rank2.log").read_text()


@pytest.mark.fault_row(26)
def test_logs_are_private_and_a_full_disk_or_a_long_line_is_told_and_survived(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    (tmp_path / "long.py").write_text(
        "import os, time\nfrom pathlib import Path\nif os.environ['RANK'] == '1':\n"
        "    print('\u00e9' * 1_500_000 + '|', flush=True)\n    Path('printed').touch()\n"
        "else:\n    print('short')\n    while not Path('printed').exists():\n        time.sleep(0.01)\n"
        "    raise ValueError('at fault')"
    )
    done = launch(tmp_path, "-n", "2", "--logs", "logs", "--show", "0,1", "long.py")
    assert "warning: the logs in logs cannot be written (No space left on device); the run continues" in done.stderr
    assert re.search(r"warning: \d+ bytes of output are missing in the logs in logs \(rank 0\)", done.stderr)
    assert "launch: rank 0 failed first: ValueError: at fault" in done.stderr
    long = "".join(line.removeprefix("[1] ") for line in done.stdout.splitlines() if line != "[0] short")
    assert long == "\u00e9" * 1_500_000 + "|"
    made = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir() if not path.is_symlink()}
    assert {"config.yaml", "rank1.log", "rank1.stack"} <= set(made)
    assert set(made.values()) == {0o600}


def test_the_rank_that_raised_is_named_and_its_victims_stay_in_the_logs(tmp_path):
    done = launch(tmp_path, "-n", "2", script("collective"), "raise")
    assert done.returncode == 1
    assert "launch: rank 1 failed first: ValueError: bad sample at index 1234" in done.stderr
    assert re.search(r"collective\.py:\d+ in step\)", done.stderr)
    assert done.stderr.count("Traceback") == 1
    assert "bootstrap" not in done.stderr
    assert "Connection closed" not in done.stderr


@pytest.mark.parametrize(
    ("data", "phase"),
    [
        ("accelerator.prepare(DataLoader(torch.ones(9, 2)))", "in forward"),
        ("torch.ones(9, 1, 2)", "after optimizer step"),
    ],
)
def test_the_place_in_the_step_is_that_of_the_failure(tmp_path, data, phase):
    """Without `accumulate()`, with a prepared loader and without one."""
    (tmp_path / "fails.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader\nfrom shardkit import Accelerator\n"
        "accelerator = Accelerator()\nmodel = torch.nn.Linear(2, 2)\n"
        "model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))\n"
        f"for batch in {data}:\n    if accelerator.counters.step == 3:\n        torch.empty(2**50)\n"
        "    accelerator.backward(model(batch).sum())\n    optimizer.step()\n"
    )
    done = launch(tmp_path, "-n", "1", "fails.py")
    said = rf"can't allocate memory.* \(fails\.py:9\), after .* s, at step 3 {phase}\.\n"
    assert re.search(said, done.stderr), done.stderr
    assert "shardkit plan --model MODULE:FUNCTION" in done.stderr


@pytest.mark.fault_row(27)
@pytest.mark.parametrize("what", ["exit", "_exit"])
def test_a_rank_that_leaves_early_is_named(tmp_path, what):
    done = launch(tmp_path, "-n", "2", script("collective"), what)
    assert done.returncode == 1
    assert "launch: rank 1 failed first: exited with code 0 while the other ranks still waited" in done.stderr
    assert "rank 0 lost its peer" in done.stderr
    assert "  next     all ranks must leave a loop, and end, together" in done.stderr


@pytest.mark.fault_row(26)
@pytest.mark.fault_row(27)
@pytest.mark.parametrize(
    ("what", "code", "cause"),
    [
        ("raise", 1, r"RuntimeError: before any process group \(.*alone.py:\d+\)"),
        ("exit", 3, r"the script called sys.exit\(3\)"),
        ("segv", 139, "killed by SIGSEGV"),
        ("abort", 134, "killed by SIGABRT"),
        ("kill", 137, "killed by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(tmp_path, what, code, cause):
    done = launch(tmp_path, "-n", "2", script("alone"), what)
    assert done.returncode == code, done.stderr
    assert re.search(f"launch: rank 1 failed first: .*{cause}", done.stderr)
    assert "rank 0 was killed by the launcher" in done.stderr


CHILD = """
import os, subprocess, sys, time
if os.environ["RANK"] == "1":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid)
    time.sleep(0.5)
    os._exit(3)
time.sleep(600)
"""


def test_what_the_failing_rank_has_started_ends_with_it(tmp_path):
    (tmp_path / "parent.py").write_text(CHILD)
    done = launch(tmp_path, "-n", "2", "parent.py")
    assert done.returncode == 3, done.stderr
    wait_until_gone([int(pid) for pid in re.findall(r"child (\d+)", done.stdout)])


def test_a_prompt_is_shown_and_what_is_typed_reaches_rank_0(tmp_path):
    with running(tmp_path, "-n", "2", script("asking")) as launched:
        launched.wait_for(r"\n\[0\] name\? $")
        launched.type("you\n")
        launched.wait_for(r"hello you\n(?:.*\n)*\[0\] \(Pdb\) $")
        launched.type("p 6 * 7\n")
        launched.wait_for(r"\(Pdb\) 42\n\[0\] \(Pdb\) $")
        launched.type("c\n")
        assert launched.end() == 0, launched.text()
    assert "after the breakpoint" in launched.text()


@pytest.mark.fault_row(28)
def test_a_stopped_rank_is_found_and_named(tmp_path):
    done = launch(tmp_path, "-n", "2", "--set", "shardkit.launch.hang_timeout_s=5", script("stopped"))
    assert done.returncode == 4, done.stderr
    assert "launch: HANG, no progress for 5 s" in done.stderr
    assert re.search(r"rank 0  step 2  backward  for \d+ s  at .*stopped.py:\d+", done.stderr)
    assert re.search(r"rank 1  step 1  data  for \d+ s  STOPPED \(SIGSTOP\)", done.stderr)
    assert "First to stop: rank 1" in done.stderr


@pytest.mark.fault_row(32)
@pytest.mark.parametrize(
    ("to", "number"), [("launcher", signal.SIGTERM), ("launcher", signal.SIGHUP), ("rank 1", signal.SIGTERM)]
)
def test_a_signal_ends_in_one_save_at_the_same_step_everywhere(tmp_path, to, number):
    if signal.getsignal(number) is signal.SIG_IGN:  # under nohup
        pytest.skip(f"{number.name} is ignored by whoever started the tests, and so by the launcher")
    with running(tmp_path, "-n", "2", script("steps")) as launched:
        launched.wait_for("step 2", count=2)
        pid = launched.process.pid if to == "launcher" else int(launched.wait_for(r"pid (\d+) of rank 1")[0])
        os.kill(pid, number)
        assert launched.end() == 75, launched.text()
    saved = re.findall(r"saving (\d+)", launched.text())
    assert len(saved) == 2
    assert len(set(saved)) == 1
    assert f"launch: told to stop after step {saved[0]}." in launched.text()


@pytest.mark.fault_row(33)
def test_a_second_signal_ends_the_ranks_at_once(tmp_path):
    with running(tmp_path, "-n", "2", script("stubborn")) as launched:
        pids = [int(pid) for pid in launched.wait_for(r"pid (\d+)", count=2)]
        launched.process.send_signal(signal.SIGTERM)
        launched.wait_for("telling the ranks to stop")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 143, launched.text()
    assert "SIGTERM ended the ranks" in launched.text()
    wait_until_gone(pids)


@pytest.mark.fault_row(33)
def test_ranks_that_do_not_stop_in_time_are_shown_and_ended(tmp_path):
    with running(tmp_path, "-n", "2", "--set", "shardkit.launch.stop_timeout_s=2", script("stubborn")) as launched:
        launched.wait_for(r"pid (\d+)", count=2)
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 143, launched.text()
    said = launched.text()
    assert "launch: SIGTERM: telling the ranks to stop within 2 s; once more ends them now" in said
    assert said.count("launch: the ranks are ended: 2 s to save and stop are over\n") == 1, said
    assert re.search(r"\n  rank 1  at \S*stubborn.py:9 in <module>\n", said), said


@pytest.mark.fault_row(33)
def test_ranks_that_wait_for_one_another_are_ended_long_before_the_time_to_stop_is_over(tmp_path):
    limits = ("--set", "shardkit.launch.hang_timeout_s=20", "--set", "shardkit.launch.stop_timeout_s=900")
    with running(tmp_path, "-n", "2", *limits, script("mismatch"), "group", str(tmp_path)) as launched:
        wait_for_files(tmp_path, "reached.0", "reached.1")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 143, launched.text()
    said = launched.text()
    assert "launch: the ranks are ended: they wait for one another, so that none can save and stop\n" in said
    assert re.search(r"\n  rank 1  step 7  step  for \d+ s  at \S*mismatch.py:\d+ in go_elsewhere, waiting for", said)


@pytest.mark.fault_row(33)
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path):
    with running(tmp_path, "-n", "2", script("stubborn")) as launched:
        pids = [int(pid) for pid in launched.wait_for(r"pid (\d+)", count=2)]
        launched.process.kill()
        launched.end()
    wait_until_gone(pids)


@pytest.mark.fault_row(34)
def test_two_launches_at_once_do_not_meet(tmp_path):
    with running(tmp_path, "-n", "2", script("world")) as one:
        other = launch(tmp_path, "-n", "2", script("world"))
        assert one.end() == 0, one.text()
    assert other.returncode == 0, other.stderr
    assert "rank 1 of 2, sum 3" in one.text()
    assert "rank 1 of 2, sum 3" in other.stdout


def test_ranks_are_started_again_and_resume(tmp_path):
    done = launch(tmp_path, "-n", "2", "--restarts", "5", script("again"), str(tmp_path), "4")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 5, no checkpoint yet" in done.stderr
    assert "restart 2 of 5, from step 40" in done.stderr
    assert "restart 4 of 5" in done.stderr
    resumed = [(tmp_path / f"try-{number}").read_text() for number in range(5)]
    assert resumed == ["never", "never", "auto", "auto", "auto"]  # what lay there before this launch is not its own


def test_the_stacks_of_a_hang_are_kept_over_a_restart(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "stacks, number = Path('logs/rank0.stack'), os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "before = stacks.stat().st_size\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "while 'in <module>' not in stacks.read_text()[before:]:\n"
        "    time.sleep(0.01)\n"
        "sys.exit(number == '0')\n"
    )
    done = launch(tmp_path, "-n", "1", "--restarts", "1", "--logs", "logs", "train.py")
    assert done.returncode == 0, done.stderr
    stacks = (tmp_path / "logs/rank0.stack").read_text()
    assert len(re.findall(r'train\.py", line \d in <module>', stacks)) == 2, stacks


@pytest.mark.fault_row(38)
def test_restarts_that_get_nowhere_are_given_up(tmp_path):
    done = launch(tmp_path, "-n", "2", "--restarts", "9", script("again"), str(tmp_path), "99")
    assert done.returncode == 1
    assert len(list(tmp_path.glob("try-*"))) == 5  # one without, then three after the checkpoint of the second
    assert "given up after 4 restarts (3 in a row without a new checkpoint)" in done.stderr
    assert re.findall(r"restart (\d): rank 0 failed first: ValueError: loss is nan at step (\d+)", done.stderr) == [
        ("1", "50"),
        ("2", "51"),
        ("3", "52"),
        ("4", "53"),
    ]


@pytest.mark.requirement("A9")
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_make_one_world(tmp_path, backend):
    main = f"127.0.0.1:{free_port()}"
    flags = ["-n", "2", "--num-machines", "2", "--main", main, "--set", f"rdzv_backend={backend}"]
    with running(tmp_path, *flags, "--machine-rank", "1", script("world")) as second:
        first = launch(tmp_path, *flags, "--machine-rank", "0", script("world"))
        assert second.end() == 0, second.text() + first.stderr
    assert first.returncode == 0, first.stderr
    ranks = re.findall(r"\[(\d)\] rank (\d) of 2, sum 3", first.stdout + second.text())
    assert sorted(ranks) == [("0", "0"), ("1", "1")]


@pytest.mark.requirement("A12")
@pytest.mark.parametrize(
    ("name", "says"),
    [("with_accelerate", "world 2, bf16, DistributedDataParallel"), ("with_trainer", "world 2, bf16, 2 steps")],
)
def test_scripts_on_accelerate_and_on_the_trainer_follow_the_file(tmp_path, name, says):
    (tmp_path / "shardkit.yaml").write_text("num_processes: 2\nmixed_precision: bf16\nuse_cpu: true\n")
    done = launch(tmp_path, script(name))
    assert done.returncode == 0, done.stderr
    assert f"[0] {says}" in done.stdout
    assert f"[1] {says}" in done.stdout
    assert "do not shard on the CPU" in done.stderr


TRAINS = """
import torch
from shardkit import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(4, 4))
accelerator.backward(model(torch.ones(2, 4)).sum())
print("trained", torch.distributed.get_debug_level())
"""


def test_ddp_trains_where_collectives_are_checked(tmp_path):
    """torch's DDP crashes on a group of gloo that checks its collectives."""
    (tmp_path / "train.py").write_text(TRAINS)
    settings = ("--set", "debug=true", "--set", "fsdp_config.fsdp_sharding_strategy=3")
    done = launch(tmp_path, "-n", "2", *settings, "train.py")
    assert done.returncode == 0 and done.stdout.count("trained DebugLevel.DETAIL") == 2, done.stdout + done.stderr
