"""Whether ranks hang, which one the others wait for, and what is said of it: without ranks."""

import pytest

from shardkit.launch import (
    stacks,
)
from shardkit.launch.hang_texts import render, rows_of, warning_of_slow
from shardkit.launch.hangs import Rank, Seen, Verdict, is_due, judge, stands_still
from shardkit.launch.rank_files import RankProgress


def rank(number: int, since_s: float, step: int = 1, watched: bool = True, phase: str = "step", **known) -> Rank:
    return Rank(RankProgress(number, number, 100 + number, phase, step, since_s, watched), **known)


@pytest.mark.fault_row(28)
def test_when_ranks_are_looked_at():
    assert is_due({0: rank(0, 10.0), 1: rank(1, 12.0)}, 5.0, 20.0)
    assert not is_due({0: rank(0, 10.0), 1: rank(1, 16.0)}, 5.0, 20.0)  # somebody moves
    assert not is_due({0: rank(0, 10.0), 1: rank(1, 17.0, watched=False, phase="starting")}, 5.0, 20.0)
    assert not is_due({0: rank(0, 10.0), 1: rank(1, 1.0, watched=False, phase="paused")}, 5.0, 20.0)
    assert is_due({0: rank(0, 19.0), 1: rank(1, 19.0, stopped_since_s=14.0)}, 5.0, 20.0)
    assert not is_due({}, 5.0, 20.0)
    plain = {number: rank(number, 1.0, watched=False, phase="starting", worked_s=19.0) for number in (0, 1)}
    assert not is_due(plain, 5.0, 20.0)  # a script that never posts, at work
    plain[1].worked_s = 14.0
    assert is_due(plain, 5.0, 20.0)
    assert is_due({0: plain[1]}, 5.0, 20.0)  # the others have ended
    assert not is_due({0: plain[1]}, 5.0, 20.0, has_peers=False)  # alone, it waits for nobody


WAITS = Seen(stacks.Stack("train.py:1", True), is_in_collective=True)
WORKS = Seen(stacks.Stack("train.py:2", False), uses_cpu=True)
MOVES = Seen(stacks.Stack("train.py:2", False), moves=True)
STANDS = Seen(stacks.Stack("train.py:3", False))
ASKS = Seen(stacks.Stack("train.py:4", True), moves=True, is_in_collective=True)
PASSES = Seen(stacks.Stack("train.py:4", True), moves=True, uses_cpu=True, is_in_collective=True)
NATIVE = Seen(stacks.Stack("train.py:5", False, is_in_backward=True))
DEBUGGED = Seen(stacks.Stack("train.py:6", False, is_debugged=True))
DEVICE = Seen(stacks.Stack("train.py:7", False), uses_cpu=True, waits_for_device=True)
STOPPED = Seen(None)


@pytest.mark.fault_row(28)
@pytest.mark.parametrize(
    ("seen", "posted", "plain"),
    [
        ((WAITS, WORKS), Verdict.SLOW, Verdict.SLOW),
        ((WAITS, MOVES), Verdict.SLOW, Verdict.SLOW),
        ((WAITS, STANDS), Verdict.HANG, Verdict.HANG),
        ((WAITS, STOPPED), Verdict.HANG, Verdict.HANG),
        ((WAITS, WAITS), Verdict.HANG, Verdict.HANG),
        ((WAITS, NATIVE), Verdict.HANG, Verdict.HANG),
        ((WAITS, ASKS), Verdict.HANG, Verdict.HANG),
        ((WAITS, PASSES), Verdict.SLOW, Verdict.SLOW),
        ((WAITS, DEBUGGED), Verdict.WORK, Verdict.WORK),
        ((DEVICE, DEVICE), Verdict.SLOW, Verdict.SLOW),
        ((DEVICE, MOVES), Verdict.SLOW, Verdict.SLOW),
        ((WORKS, WORKS), Verdict.SLOW, Verdict.WORK),
        ((WORKS, STANDS), Verdict.SLOW, Verdict.WORK),
        ((STANDS, STANDS), Verdict.HANG, Verdict.SLOW),
    ],
)
def test_nobody_is_ended_who_works_or_for_whom_nobody_waits(seen, posted, plain):
    by_rank = dict(enumerate(seen))
    watched = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    assert judge(watched, by_rank, 5.0, 20.0) is posted
    silent = {number: rank(number, 1.0, watched=False, phase="starting") for number in (0, 1)}
    assert judge(silent, by_rank, 5.0, 20.0) is plain
    assert stands_still(seen) is (plain is Verdict.HANG)
    out_of_patience = judge(watched, by_rank, 5.0, 28.0)
    assert out_of_patience is (Verdict.HANG if posted is Verdict.SLOW and seen[0] in (WAITS, DEVICE) else posted)


def test_a_rank_that_asks_its_device_for_a_value_may_wait_for_its_peers(tmp_path):
    train = tmp_path / "train.py"
    lines = ["loss = model(x)", "print(loss.item())", "torch.cuda.synchronize()", "y = torch.linalg.svd(x)"]
    train.write_text("\n".join([*lines, "x = batch.to(device)", "x = go_to(device)", ""]))
    stack = 'Thread 0x1 (most recent call first):\n  File "{}", line {} in step\n  File "{}", line 9 in <module>\n'
    waits = {line: stacks.parse(stack.format(train, line, train)).is_at_device_wait for line in range(1, 7)}
    assert waits == {1: False, 2: True, 3: True, 4: False, 5: True, 6: False}
    backward = stack.format("/lib/torch/autograd/graph.py", 841, train)  # its kernels fill the device's queue
    assert stacks.parse(backward).is_at_device_wait and stacks.parse(backward).is_in_backward
    ranks = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    said = warning_of_slow(ranks, {0: DEVICE, 1: WORKS}, 5.0)
    assert "  Rank 0 waits for its device; the run is ended after 15 s without progress." in said
    table = render(rows_of(ranks, {0: DEVICE, 1: WORKS}, 20.0), 5.0, "logs")
    assert "at train.py:7, waiting for its device" in table
    assert "First to stop: rank 1." in table


def test_what_is_said_of_slow_ranks():
    ranks = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    said = warning_of_slow(ranks, {0: WAITS, 1: WORKS}, 5.0).splitlines()
    assert said[0] == "launch: no progress for 5 s, but rank 1 is at work at train.py:2. The run continues."
    assert said[1].startswith("  Rank 0 waits for its peers in a collective; the run is ended after 15 s without")
    assert "accelerator.pause()" in said[2]
    ranks[2] = rank(2, 11.0)
    said = warning_of_slow(ranks, {0: WAITS, 1: WORKS, 2: WAITS}, 5.0).splitlines()
    assert said[1].startswith("  Ranks 0, 2 wait for their peers in a collective; the run is ended after")


IN_A_COLLECTIVE = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f8 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 20 in step
  File "/home/me/train.py", line 31 in <module>
"""
IN_A_SHARDED_VALUE = """\
Current thread 0x00007f8 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/_ops.py", line 1279 in __call__
  File "/venv/lib/python3.11/site-packages/torch/distributed/_functional_collectives.py", line 142 in wait_tensor
  File "/venv/lib/python3.11/site-packages/torch/distributed/tensor/_api.py", line 774 in full_tensor
  File "/home/me/train.py", line 25 in <module>
"""
IN_PDB = """\
Thread 0x00007f8 (most recent call first):
  File "/usr/lib/python3.11/cmd.py", line 126 in cmdloop
  File "/usr/lib/python3.11/pdb.py", line 383 in _cmdloop
  File "/home/me/train.py", line 20 in step
"""
IN_THE_DATA = """\
Current thread 0x00007f8 (most recent call first):
  File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 3 in open
  File "/home/me/data.py", line 88 in __getitem__
"""


@pytest.mark.fault_row(28)
def test_the_rank_that_the_others_wait_for_is_named():
    waiting, loading = stacks.parse(IN_A_COLLECTIVE), stacks.parse(IN_THE_DATA)
    assert (waiting.where, waiting.waits_for_peers) == ("/home/me/train.py:20 in step", True)
    assert (loading.where, loading.waits_for_peers) == ("/home/me/data.py:88 in __getitem__", False)
    sharded = stacks.parse(IN_A_SHARDED_VALUE)  # `.item()` of a sharded parameter: the innermost line calls an operator
    assert (sharded.where, sharded.waits_for_peers) == ("/home/me/train.py:25 in <module>", True)
    assert stacks.parse(IN_PDB).is_debugged and not loading.is_debugged
    ranks = {0: rank(0, 10.0), 1: rank(1, 11.0, phase="data")}
    found = {0: Seen(waiting, is_in_collective=True), 1: Seen(loading)}
    assert "First to stop: rank 1" in render(rows_of(ranks, found, 20.0), 5.0, "logs")
    left = {**ranks, 2: rank(2, 12.0, step=5, exit_code=0)}
    assert render(rows_of(left, found, 20.0), 5.0, "logs").splitlines() == [
        "launch: HANG, no progress for 5 s",
        "  rank 0  step 1  step  for 10 s  at /home/me/train.py:20 in step, waiting for its peers",
        "  rank 1  step 1  data  for 9 s  at /home/me/data.py:88 in __getitem__",
        "  rank 2  exited with code 0",
        "  First to stop: rank 2. The stacks of all ranks are in logs/rank*.stack.",
    ]
    said = render(rows_of(left, found, 20.0), 5.0, "machine 1 (b): runs/y", "runs/x")
    assert "The stacks of all ranks are in machine 1 (b): runs/y/rank*.stack, runs/x/rank*.stack." in said
    stopped = rows_of({0: rank(0, 10.0), 1: rank(1, 11.0, stopped_since_s=11.0)}, {}, 20.0)
    assert "First to stop: rank 1" in render(stopped, 5.0, "logs")
    two_waiting = rows_of({0: rank(0, 10.0)}, {0: WAITS}, 20.0) + rows_of({1: rank(1, 11.0)}, {1: WAITS}, 20.0)
    said = render(two_waiting, 5.0, "logs")
    assert "Every rank waits for its peers" in said and "at different lines" not in said
    other_folder = Seen(stacks.parse(IN_A_COLLECTIVE.replace("/home/me/", "/b/")), is_in_collective=True)
    both = {0: Seen(waiting, is_in_collective=True), 1: other_folder}
    two_folders = rows_of({0: rank(0, 10.0), 1: rank(1, 11.0)}, both, 20.0)
    assert "/b/" in render(two_folders, 5.0, "logs") and "at different lines" not in render(two_folders, 5.0, "logs")
    elsewhere = Seen(stacks.parse(IN_A_COLLECTIVE.replace("line 20", "line 30")), is_in_collective=True)
    apart = rows_of({0: rank(0, 10.0), 1: rank(1, 11.0)}, {0: Seen(waiting, is_in_collective=True), 1: elsewhere}, 20.0)
    said = render(apart, 5.0, "logs")
    assert "They wait at different lines" in said and "by a value of its own (early stopping)" in said
    assert "one rank has caught an error (`try`, `except`)" in said


def test_where_all_ranks_of_a_machine_wait_another_one_is_judged_first():
    ranks = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    seen = {0: WAITS, 1: WAITS}
    assert judge(ranks, seen, 5.0, 20.0, has_others=True) is Verdict.SLOW
    assert judge(ranks, seen, 5.0, 28.0, has_others=True) is Verdict.HANG
    assert "ranks of another machine may be at work" in warning_of_slow(ranks, seen, 5.0)
