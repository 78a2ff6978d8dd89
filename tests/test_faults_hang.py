"""Ranks that stand still, and ranks in different collectives, under `shardkit launch`: named, and the run ends."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.launch import failure

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 240


def launch(folder: Path, script: str, *arguments: str, settings: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and screen of a script on two ranks, with a hang timeout of 5 s."""
    command = [sys.executable, "-m", "shardkit", "launch", "--cpu", "-n", "2", "--logs", "logs"]
    for setting in ("shardkit.launch.hang_timeout_s=5", *settings):
        command += ["--set", setting]
    done = subprocess.run(
        [*command, str(SCRIPTS / f"{script}.py"), *arguments],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def assert_named(folder: Path, rank: int, code: int, screen: str, phase: str, where: str, others_phase: str) -> None:
    """The hung rank is named with its phase; the other one with the line at which it waits, and with its stack."""
    other = 1 - rank
    assert code == 4, screen
    assert "nothing stood still" not in screen
    assert "launch: HANG, no progress for 5 s" in screen
    assert f"First to stop: rank {rank}" in screen
    assert re.search(rf"rank {rank}  step 2  {phase}  for \d+ s  {where}", screen), screen
    waits = rf"rank {other}  step 2  {others_phase}  for \d+ s  at .*hangs\.py:\d+.*, waiting for its peers"
    assert re.search(waits, screen), screen
    assert "hangs.py" in (folder / "logs" / f"rank{other}.stack").read_text()


@pytest.mark.faults
@pytest.mark.fault_row(28)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "mark", "phase", "others"),
    [
        ("stop", "stop", "forward", "backward"),
        ("save", "write", "save", "save"),
        ("load", "read", "load", "load"),
    ],
)
def test_a_rank_stopped_from_outside_is_named_in_every_phase(tmp_path, what, mark, phase, others, rank):
    code, screen = launch(tmp_path, "hangs", what, str(rank), str(tmp_path))
    assert (tmp_path / f"{mark}.{rank}").exists(), screen
    assert_named(tmp_path, rank, code, screen, phase, r"STOPPED \(SIGSTOP\)", others)


@pytest.mark.faults
@pytest.mark.fault_row(29)
@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("lock", "stand_still"),
        ("busy", "stand_still"),
        ("moving", "go_down"),
        ("native", "hold_the_interpreter"),
    ],
)
def test_a_rank_that_comes_no_further_is_named(tmp_path, what, where):
    """A lock taken twice; a loop on one line; a loop whose stack moves; a native call that keeps the GIL."""
    code, screen = launch(tmp_path, "hangs", what, "1", str(tmp_path))
    assert (tmp_path / f"{what}.1").exists(), screen
    assert_named(tmp_path, 1, code, screen, "forward", rf"at .*hangs\.py:\d+ in ({where}|count_for_ever)", "backward")
    assert where in (tmp_path / "logs" / "rank1.stack").read_text()


@pytest.mark.faults
@pytest.mark.fault_row(29)
def test_a_lock_that_nobody_gives_back_is_named(tmp_path):
    code, screen = launch(tmp_path, "locked", str(tmp_path))
    assert (tmp_path / "taken").exists(), screen
    assert code == 4, screen
    assert "First to stop: rank 1" in screen
    assert re.search(r"rank 0  step 2  backward  for \d+ s  at .*locked\.py:\d+", screen), screen
    assert re.search(r"rank 1  step 1  data  for \d+ s  at .*locked\.py:\d+ in take_twice", screen), screen


@pytest.mark.faults
@pytest.mark.fault_row(30)
@pytest.mark.parametrize(("what", "there"), [("kind", r"BROADCAST \[4\] Float"), ("shape", r"ALLREDUCE \[5\] Float")])
def test_different_collectives_are_shown_with_both_lines(tmp_path, what, there):
    code, screen = launch(tmp_path, "mismatch", what, str(tmp_path), settings=("debug=true",))
    assert_reached(tmp_path, screen)
    assert code == 1, screen
    told = re.findall(
        r"rank (\d)(?: failed first)?: RuntimeError: the ranks are in different collectives: (.*)", screen
    )
    assert sorted(rank for rank, _ in told) == ["0", "1"], screen
    for rank, text in told:
        assert re.search(rf"rank 1 in {there}", text) and "rank 0 in ALLREDUCE [4] Float" in text
        assert re.search(rf"mismatch\.py:\d+ in {'reduce_here' if rank == '0' else 'go_elsewhere'}\)", text), screen


@pytest.mark.faults
@pytest.mark.fault_row(30)
@pytest.mark.parametrize("debug", ["true", "false"])
def test_collectives_of_different_groups_are_shown_with_both_lines(tmp_path, debug):
    """torch compares within a group: here both ranks wait, with debug on or off, and the hang is what is seen."""
    code, screen = launch(tmp_path, "mismatch", "group", str(tmp_path), settings=(f"debug={debug}",))
    assert_reached(tmp_path, screen)
    assert code == 4, screen
    for rank, function in ((0, "reduce_here"), (1, "go_elsewhere")):
        row = rf"rank {rank}  step 7  step  for \d+ s  at .*mismatch\.py:\d+ in {function}, waiting for its peers"
        assert re.search(row, screen), screen
    assert "Every rank waits for its peers: their collectives do not match" in screen


def assert_reached(folder: Path, screen: str) -> None:
    assert {path.name for path in folder.glob("reached.*")} == {"reached.0", "reached.1"}, screen
    assert "nothing went wrong" not in screen


MISMATCH = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint("
    "SequenceNumber=5, OpType=ALLREDUCE, TensorShape=[4, 2], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype="
    "float (default), device=cpu)), but Rank 12 is running collective: CollectiveFingerPrint(SequenceNumber=5, "
    "OpType=BARRIER).Collectives differ in the following aspects:   Op type: ALLREDUCEvs BARRIER"
)


@pytest.mark.fault_row(30)
def test_what_torch_says_of_a_mismatch_is_cut_to_what_matters():
    words = "the ranks are in different collectives: rank 0 in ALLREDUCE [4, 2] Float, rank 12 in BARRIER"
    assert failure.message_of(RuntimeError(MISMATCH)) == words
    misread = MISMATCH.replace("SequenceNumber=5, OpType=BARRIER", "SequenceNumber=0OpType=ALLTOALL")
    assert failure.message_of(RuntimeError(misread)) == words.replace("BARRIER", "another")
    assert failure.message_of(RuntimeError(MISMATCH.replace("5, OpType=BAR", "5OpType=BAR"))) == words
    assert failure.message_of(RuntimeError("Rank 0 is running collective: what?")).startswith("Rank 0 is")
