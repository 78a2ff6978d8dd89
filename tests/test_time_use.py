"""Where the ranks' time goes: their clocks, the file in the log folder, and the line at the end of a launch."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shardkit.launch import time_use
from shardkit.launch.phase_clock import KINDS, PhaseClock, until
from shardkit.launch.rank_files import ProgressWriter, read_progress
from shardkit.launch.time_use import Attempt
from tests.launches import launch

TRAINS = """
import sys
import time
import torch
from shardkit import Accelerator, ProjectConfiguration

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.ones(4)

project = ProjectConfiguration(project_dir="project", automatic_checkpoint_naming=True)
accelerator = Accelerator(project_config=project)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader, held_out = accelerator.prepare(
    model, optimizer, *(torch.utils.data.DataLoader(Slow()) for _ in range(2))
)
has_resumed = accelerator.resume()
for epoch in range(loader.epoch, 2):
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
        if epoch == 1 and not has_resumed and accelerator.process_index == 1:
            sys.exit(7)
    accelerator.save_state()
    for batch in held_out:
        with torch.no_grad():
            model(batch)
        time.sleep(0.3)
    time.sleep(0.5)
"""


def clock_after(*phases: tuple[str, int]) -> PhaseClock:
    """A clock that has entered these phases at these seconds, all of step 1."""
    clock = PhaseClock(0.0)
    for phase, second in phases:
        clock.enter(phase, 1, second)
    return clock


def by_kind(seconds: Sequence[float]) -> dict[str, float]:
    """Those that are not 0."""
    return {kind: one for kind, one in zip(KINDS, seconds, strict=True) if one}


STEP = [("forward", 10), ("backward", 13), ("optimizer step", 15), ("after optimizer step", 16), ("data", 17)]
DONE = {"start": 10, "first step": 6, "steps": 1}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([], {}),
        ([("forward", 10)], {"start": 10}),
        (STEP, DONE),
        ([*STEP, ("forward", 20), ("forward", 21), ("backward", 23)], DONE | {"data": 3, "steps": 4}),
        ([*STEP, ("forward", 20), ("data", 24)], DONE | {"data": 3, "evaluation": 4}),
        (
            [("load", 2), ("loaded", 5), ("forward", 6), ("data", 9)],
            {"start": 2, "load": 3, "other": 1, "evaluation": 3},
        ),
        (
            [*STEP, ("after a loop", 18), ("save", 20), ("saved", 25), ("data", 26)],
            DONE | {"data": 1, "other": 3, "save": 5},
        ),
    ],
)
def test_seconds_by_kind(phases, expected):
    assert by_kind(clock_after(*phases).spent) == pytest.approx(expected)


def test_a_forward_that_has_not_ended_is_of_a_step():
    clock = clock_after(*STEP, ("forward", 20), ("forward", 22))
    assert by_kind(clock.spent)["steps"] == 3
    assert until(clock.spent, "forward", 5.0)["steps"] == 8
    assert until(clock_after(("forward", 10)).spent, "forward", 5.0)["first step"] == 5
    assert until(clock.spent, "my phase", 5.0)["other"] == 5


def test_what_is_kept_came_before_the_save_and_not_before_its_end():
    clock = clock_after(*STEP, ("save", 20), ("saved", 21), ("data", 25))
    assert by_kind(clock.kept) == {}
    clock.committed(1)
    assert by_kind(clock.kept) == DONE | {"data": 3}
    clock.enter("forward", 2, 30)
    clock.committed(2)  # of a save that this rank took no part in
    assert by_kind(clock.kept) == by_kind(clock.spent)


def test_a_rank_tells_its_seconds(tmp_path):
    writer = ProgressWriter(tmp_path, 0, 0)
    for phase in ("starting", "forward", "backward", "save"):
        writer.post(phase, 3)
    writer.committed(3)
    found = read_progress(tmp_path)[0]
    assert set(by_kind(found.spent_s)) == {"start", "first step"}
    assert found.kept_s == found.spent_s


def attempt(restart: int = 0, lost_s: float = 0.0, **spent_s: float) -> Attempt:
    spent_s = dict.fromkeys(KINDS, 0.0) | {kind.replace("_", " "): seconds for kind, seconds in spent_s.items()}
    return Attempt(("host", 1), "", restart, 2, lost_s > 0, sum(spent_s.values()), spent_s, lost_s)


@pytest.mark.parametrize(
    ("attempts", "wall_s", "expected"),
    [
        ([], 0, ""),
        ([attempt(steps=59)], 0, ""),
        (
            [attempt(steps=59)],
            100,
            "time: steps 59%, start 41%\n  no loader was prepared, so that waits for batches are part of steps",
        ),
        ([attempt(steps=95, data=4.7, save=0.3)], 0, "time: steps 95%, data 5%"),
        (
            [attempt(first_step=20, steps=60, data=20, lost_s=50), attempt(1, steps=90, load=10)],
            0,
            "time: steps 75%, data 10%, first step 10%, loads 5%; 25% lost to 1 restart\n"
            "  ranks waited for batches: more DataLoader workers (num_workers) may save up to 10%",
        ),
    ],
)
def test_the_line_at_the_end(attempts, wall_s, expected):
    """Where the launch has lasted longer than its attempts, it has waited for machines."""
    wall_s = wall_s or sum(one.wall_s for one in attempts)
    assert time_use.summary(attempts, wall_s) == expected


def test_a_launch_tells_of_its_own_attempts_only(tmp_path, monkeypatch):
    own = replace(attempt(steps=86.0, data=4.0), launcher=time_use._launcher())
    time_use.record(tmp_path, 0, replace(own, launcher=("host", 0)), print)
    time_use.record(tmp_path, 3, own, print)
    with (tmp_path / "time.jsonl").open("a") as file:
        file.write('{"launcher": ["vm", 2], "more": 3}\n')  # of another version
        file.write('{"launcher": ["vm", ')  # of a launcher that was killed
    said: list[str] = []
    with time_use.told(tmp_path, time.monotonic() - 90.0, said.append):
        pass
    assert said == ["time: steps 96%, data 4%"]


@pytest.mark.slow
def test_a_launch_whose_log_folder_is_gone_ends_as_its_ranks_do(tmp_path):
    (tmp_path / "train.py").write_text("import shutil, sys; shutil.rmtree('out'); sys.exit(int(sys.argv[1]))")
    done = launch(tmp_path, "-n", "1", "--logs", "out/logs", "train.py", "0")
    assert done.returncode == 0, done.stderr
    assert "warning: out/logs/time.jsonl cannot be written (No such file or directory)" in done.stderr
    failed = launch(tmp_path, "-n", "1", "--logs", "out/logs", "train.py", "7")
    assert failed.returncode == 7 and "rank 0 failed first" in failed.stderr


BY_HAND = """
import time
import torch
from shardkit import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(torch.ones(8, 4)))
for number, batch in enumerate(loader):
    loss = model(batch).sum()
    time.sleep(0.1)
    loss.backward()
    if number % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_micro_batches_with_backwards_by_hand_are_no_evaluation(tmp_path):
    (tmp_path / "train.py").write_text(BY_HAND)
    done = launch(tmp_path, "-n", "1", "--logs", "logs", "train.py")
    assert done.returncode == 0, done.stderr
    spent_s = json.loads((tmp_path / "logs" / "time.jsonl").read_text())["spent_s"]
    assert spent_s["evaluation"] == 0
    assert min(spent_s["first step"], spent_s["steps"]) >= 0.4


@pytest.mark.slow
def test_a_launch_with_a_restart(tmp_path):
    (tmp_path / "train.py").write_text(TRAINS)
    done = launch(tmp_path, "-n", "2", "--restarts", "1", "--logs", "logs", "train.py")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, (tmp_path / "logs" / "time.jsonl").read_text().splitlines())
    for one in (first, second):
        assert sum(one["spent_s"].values()) == pytest.approx(one["wall_s"], abs=0.01)
        assert (one["ranks"], list(one["spent_s"])) == (2, list(KINDS))
    assert (first["restart"], first["is_failed"], second["restart"], second["is_failed"]) == (0, True, 1, False)
    assert first["spent_s"]["evaluation"] > 1.0 and second["spent_s"]["evaluation"] > 1.0
    assert first["spent_s"]["steps"] > 0.8 and second["spent_s"]["steps"] > 0.6
    assert first["spent_s"]["data"] > 0.7
    assert first["spent_s"]["other"] > 0.4
    assert first["lost_s"] > 0.4 + 1.2 + 0.5  # an evaluation, the pause, a step
    assert first["lost_s"] < first["wall_s"] - first["spent_s"]["start"]
    assert second["lost_s"] == 0
    assert "\ntime: " in done.stderr and "% lost to 1 restart\n" in done.stderr
