"""Ranks that are slow and no hang, and hangs of scripts without an Accelerator."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launches import Running, folder_for, script

HANG = ("-n", "2", "--set", "shardkit.launch.hang_timeout_s=3")


def outcomes(folder: Path, *runs: tuple[str, str]) -> list[tuple[int, str]]:
    """Exit code and screen of scripts that run at once, because they mostly wait."""
    started = [Running(folder_for(folder, what), *HANG, script(name), what) for name, what in runs]
    try:
        return [(run.end(), run.text()) for run in started]
    finally:
        for run in started:
            run.close()


@pytest.mark.faults  # test_hangs has who is slow and who hangs, without ranks that sleep
@pytest.mark.fault_row(44)
def test_who_works_or_says_so_goes_on_and_who_waits_in_vain_does_not(tmp_path):
    computes, paused, asleep = outcomes(tmp_path, ("slow", "compute"), ("slow", "pause"), ("plain", "sleep"))
    for code, said in (computes, paused):
        assert code == 0, said
        assert said.count("came through") == 2
        assert "HANG" not in said
    assert re.search(
        r"launch: no progress for 3 s, but rank 0 is at work at \S*slow.py:\d+ in compute, rank 1", computes[1]
    )
    assert "is at work" not in paused[1], paused[1]
    assert asleep[0] == 4, asleep[1]
    assert re.search(r"rank 0  at \S*plain.py:\d+ in <module>, waiting for its peers", asleep[1])
    assert re.search(r"rank 1  at \S*plain.py:\d+ in go_elsewhere", asleep[1])
    assert "First to stop: rank 1" in asleep[1]


@pytest.mark.slow
@pytest.mark.fault_row(44)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU time of processes is read on Linux only")
def test_ranks_that_stand_still_are_shown_long_before_the_run_is_ended(tmp_path):
    run = Running(tmp_path, "-n", "2", script("slow"), "sleep")
    try:
        code, said = run.end(), run.text()
    finally:
        run.close()
    assert code == 0 and said.count("came through") == 2, said
    assert said.count("launch: for 30 s no rank has made progress or used CPU time") == 1, said
    assert re.search(r"rank 0  step 1  .* for 3\d s  at \S*slow.py:\d+ in <module>\n", said), said
    assert re.search(r"rank 1  step 1  .* for 3\d s  at \S*slow.py:\d+ in train, waiting for its peers\n", said), said
    assert "The run is ended after 600 s without progress (shardkit.launch.hang_timeout_s), also where" in said


@pytest.mark.faults
@pytest.mark.fault_row(44)
def test_a_plain_script_that_spins_or_mismatches_is_reported(tmp_path):
    spin, mismatch = outcomes(tmp_path, ("plain", "spin"), ("plain", "mismatch"))
    assert (spin[0], mismatch[0]) == (0, 4), spin[1] + mismatch[1]
    assert re.search(r"but rank 1 is at work at \S*plain.py:\d+ in go_elsewhere. The run continues", spin[1])
    assert "Rank 0 waits for its peers in a collective." in spin[1]
    assert "their collectives do not match" in mismatch[1]


BLOCKED = """
import ctypes, faulthandler, socket, subprocess, sys, time
from shardkit.launch import processes
faulthandler.register(processes.STACKS_SIGNAL, file=open(sys.argv[1], "w"))
processes.take_stack_signals()
ours, theirs = socket.socketpair()
ours.settimeout(0.5)
calls = {
    "sleep": lambda: time.sleep(0.5),
    "usleep": lambda: ctypes.CDLL(None).usleep(500_000),
    "poll": lambda: ctypes.CDLL(None).poll(None, 0, 500),
    "recv": lambda: ours.recv(1),
    "wait": lambda: subprocess.run(["sleep", "0.5"], check=True),
}
for name, call in calls.items():
    print(name, flush=True)
    began = time.monotonic()
    try:
        result = call()
    except TimeoutError:
        result = 0
    assert time.monotonic() - began >= 0.499, name
    assert result in (0, None) or name == "wait", (name, result)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the thread that takes the signal is Linux's")
def test_asking_for_stacks_cuts_no_blocking_call_short(tmp_path):
    from shardkit.launch import processes

    path = tmp_path / "stack"
    command = [sys.executable, "-c", BLOCKED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as asked:
        assert asked.stdout is not None
        for _ in asked.stdout:
            for _ in range(3):
                assert processes.ask_for_stacks(asked.pid)
        assert asked.wait(timeout=60) == 0
    assert path.read_text().count('File "<string>"') >= 5
    assert not processes.ask_for_stacks(asked.pid)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the thread that takes the signal is Linux's")
def test_a_rank_that_has_become_another_program_is_not_signalled():
    from shardkit.launch import processes

    with subprocess.Popen(["sleep", "60"]) as other:
        assert not processes.ask_for_stacks(other.pid)
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU time of processes is read on Linux only")
def test_a_process_whose_name_is_cut_inside_a_letter_ends_no_watch():
    """The system cuts names at 15 bytes; that of any process on the machine is read."""
    from shardkit.launch import ports, processes

    code = "open('/proc/self/comm', 'wb').write('обучение'.encode()); print(flush=True); open(0).read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        session = os.getsid(0)
        assert processes.cpu_s({session}).keys() == {session}
        assert processes.state(other.pid) in "RSD"
        assert not processes.ask_for_stacks(other.pid)
        assert "обучени" in ports._command(processes.PROC / str(other.pid))
        other.stdin.close()
