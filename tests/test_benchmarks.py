"""The benchmarks run and write what they found. No time is compared here: that is for a quiet machine."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import checkpoint, contestants, faults, interleaved, step

ROOT = Path(__file__).parent.parent
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 32, "seq": 8, "batch": 1, "steps": 1, "rounds": 2}
TINY = ["--cpu", *(f"--{name}={value}" for name, value in SIZES.items())]


def result_of(tmp_path: Path, module: str, *arguments: str) -> dict:
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", module, *arguments, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(output.read_text())


@pytest.mark.loops
def test_step(tmp_path: Path) -> None:
    result = result_of(tmp_path, "benchmarks.step", "--family", "fsdp", *TINY)
    for kind in ("wall", "cpu"):
        found = result["fsdp"][kind]
        assert {"shardkit", "by hand, fused AdamW", "by hand, default AdamW"} <= set(found["rounds"])
        assert {len(values) for values in found["rounds"].values()} == {2}
        assert len(found["ratios"]) == len(found["rounds"]) - 1
    assert "CPU" in result["fsdp"]["left_out"]["accelerate"]


def test_step_says_where_it_was_measured(capsys: pytest.CaptureFixture) -> None:
    """Where there are fewer GPUs than ranks, that is the CPU."""
    rounds = {"shardkit": [1.0], "by hand, fused AdamW": [1.0]}
    step._show("fsdp", "2 ranks on cpu", {"wall_s": rounds, "cpu_s": rounds, "left_out": {}})
    assert "FSDP, 2 ranks on cpu, a step, seconds\n" in capsys.readouterr().out


@pytest.mark.loops
def test_boundary(tmp_path: Path) -> None:
    result = result_of(tmp_path, "benchmarks.boundary", "--ranks", "2", "--boundaries=3", "--rounds=2")
    assert set(result["2"]["rounds"]) == {"beside", "asked", "all-reduce"}


@pytest.mark.loops
def test_optimizer(tmp_path: Path) -> None:
    result = result_of(tmp_path, "benchmarks.optimizer", "--tensors", "4", "--rounds=2")
    for what in ("first", "later"):
        assert {"shardkit", "kernels alone"} <= set(result["4"][what]["rounds"])


@pytest.mark.loops
def test_startup(tmp_path: Path) -> None:
    found = result_of(tmp_path, "benchmarks.startup", "--group", "launch", "--rounds", "1")["launch"]
    assert "shardkit launch" in found["rounds"]
    assert {"torchrun", "accelerate launch"} <= {*found["rounds"], *found["left_out"]}
    assert all(value > 0 for values in found["rounds"].values() for value in values)


@pytest.mark.loops
def test_checkpoint(tmp_path: Path) -> None:
    result = result_of(tmp_path, "benchmarks.checkpoint", "--layers", "1", "--rounds", "1")
    for family, compared in checkpoint.COMPARED.items():
        found = result[family]
        assert {(one["ours"], one["theirs"]) for one in found["ratios"]} == {names[:2] for names in compared}
        assert all(value > 0 for values in found["rounds"].values() for value in values)
    assert "CPU" in result["fsdp"]["left_out"]["accelerate"] and not result["ddp"]["left_out"]


@pytest.mark.loops
def test_checkpoint_scale(tmp_path: Path) -> None:
    sizes = ["--blocks", "1", "--ranks", "2", "64", "--dcp-ranks", "2", "64"]
    result = result_of(tmp_path, "benchmarks.checkpoint_scale", *sizes)
    assert {one["tensors"] for one in result["shardkit"].values()} == {4 * 12}  # a weight, two moments, a step each
    assert result["dcp"]["64"]["metadata_mb"] > 10 * result["dcp"]["2"]["metadata_mb"], "DCP's grows with the ranks"


@pytest.mark.loops
def test_data(tmp_path: Path) -> None:
    result = result_of(tmp_path, "benchmarks.data", "--samples", "10000", "--batches", "5", "--rounds", "1")
    found = result["10000"]
    assert set(found) == {"first batch", "memory", "a batch", "batch in the middle"}
    assert set(found["first batch"]["rounds"]) == {"shardkit", "torch", "accelerate"} - set(result["left_out"])
    assert all(len(values) == 1 for one in found.values() for values in one["rounds"].values())


@pytest.mark.parametrize(
    ("package", "setup"),
    [
        ("lightning_fabric.strategies", lambda task: contestants.with_fabric_fsdp(task, fused=None)),
        ("lightning_fabric.strategies", contestants.with_fabric_ddp),
        ("accelerate", contestants.with_accelerate_ddp),
    ],
)
def test_a_missing_peer_is_left_out(package: str, setup: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    task = contestants.Task(layers=1, hidden=16, heads=2, vocab=32, seq=8, batch=1, device="cpu")
    with pytest.raises(contestants.Unavailable, match="cannot be imported"):
        setup(task)


def without_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the processes that this one starts."""
    (tmp_path / "accelerate.py").write_text("raise ModuleNotFoundError(\"No module named 'accelerate'\")")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


@pytest.mark.loops
def test_faults_leaves_out_a_launcher_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_accelerate(tmp_path, monkeypatch)
    result = result_of(tmp_path, "benchmarks.faults", "--fault", "raises", "--machines", "1", "--rounds", "1")
    found = result["raises on 1"]
    assert [len(found[name]) for name in ("shardkit launch", "torchrun")] == [1, 1]
    assert "No module named 'accelerate'" in found["left_out"]["accelerate launch"]


@pytest.mark.slow
def test_the_wizards_first_question_is_the_one_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_accelerate(tmp_path, monkeypatch)
    result = result_of(tmp_path, "benchmarks.wizard", "--rounds", "1")
    assert result["rounds"].keys() == {"shardkit"} and result["rounds"]["shardkit"][0] > 0
    assert "No module named" in result["left_out"]["accelerate"]


def test_where_the_result_cannot_be_written_nothing_is_measured(tmp_path: Path) -> None:
    assert interleaved.writable(str(tmp_path / "new" / "found.json")) == tmp_path / "new" / "found.json"
    assert not [*(tmp_path / "new").iterdir()]
    (tmp_path / "file").touch()
    for name, told in (("file/found.json", "cannot be written"), ("new", "is a folder; name a file in it")):
        with pytest.raises(argparse.ArgumentTypeError, match=told):
            interleaved.writable(str(tmp_path / name))


def test_turns_are_fair() -> None:
    names = ["a", "b", "c", "d"]
    taken = list(interleaved.turns(names, 8))
    orders = [[name for number, name in taken if number == one] for one in range(8)]
    assert all(sorted(order) == names for order in orders)
    before = Counter((first, second) for order in orders for first, second in pairwise(order))
    assert all(before[one, other] and before[other, one] for one, other in (("a", "b"), ("b", "c"), ("c", "d")))
    assert len({order[0] for order in orders}) == len(names)


def test_a_ratio_is_taken_within_rounds() -> None:
    measured = {"ours": [1.0, 2.0, 30.0, 4.0], "theirs": [2.0, 4.0, 60.0, 8.0]}
    found = interleaved.ratio(measured, "ours", "theirs")
    assert (found.median, found.low, found.high) == (0.5, 0.5, 0.5)


def test_quartiles_and_table() -> None:
    measured = {"ours": [0.001, 0.002, 0.003], "theirs": [0.004]}
    assert interleaved.spread(measured["ours"]) == interleaved.Spread(0.002, 0.0015, 0.0025)
    text = interleaved.table(measured, [interleaved.Ratio("ours", "theirs", 0.5, 0.25, 0.75)])
    assert "2.00 ms   (1.50 to 2.50)" in text
    assert "ours / theirs: 0.500   (0.250 to 0.750)" in text


@pytest.mark.slow
def test_control_plane(tmp_path: Path) -> None:
    result = result_of(tmp_path, "benchmarks.control_plane", "--ranks", "2", "--times=2")
    assert {"meet", "collect", "share", "exchange", "requests_per_s", "sockets"} == set(result["2"])


@pytest.mark.parametrize(
    ("screen", "named"),
    [
        ("launch: rank 1 failed first: ValueError: at fault (script.py:9), after 2.0 s.", True),
        ("launch: rank 0 failed first: ValueError: at fault (script.py:9), after 2.0 s.", False),
        (
            "ValueError: at fault\nRoot Cause (first observed failure):\n  rank : 1 (local_rank: 1)\n  exitcode : 1",
            True,
        ),
        (
            "ValueError: at fault\nRoot Cause (first observed failure):\n  rank : 0 (local_rank: 0)\n  exitcode : 1",
            False,
        ),
        ("nothing", False),
    ],
)
def test_faults_knows_whom_a_screen_names(screen: str, named: bool) -> None:
    assert faults.names_it(screen, 1, 0, "raises") is named


def test_faults_knows_a_rank_that_left() -> None:
    screen = "launch: rank 1 failed first: exited with code 0 while the other ranks still waited for it, after 0.4 s."
    assert faults.names_it(screen, 1, 0, "leaves") and not faults.names_it(screen, 0, 0, "leaves")


def test_faults_knows_which_machine_a_screen_calls_lost() -> None:
    screen = "launch: lost machine 1 (node-b): no sign of life for 30 s."
    assert faults.names_it(screen, 3, 1, "launcher") and not faults.names_it(screen, 3, 0, "launcher")


@pytest.mark.loops
def test_generate(tmp_path: Path) -> None:
    sizes = ("--layers=1", "--width=16", "--tokens=2", "--rounds=2")
    result = result_of(tmp_path, "benchmarks.generate", *sizes)
    assert len(result["generate"]["rounds"]) == 4
