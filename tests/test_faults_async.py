"""Saving beside training when it dies, fails, or is slow; and the protocol itself with a step taken out."""

import inspect
import os
import random
import re
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardkit.checkpoint import faults
from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.saving import async_save, commit, opening, retention, write
from shardkit.distributed import control
from shardkit.errors import CheckpointError, CheckpointSaveError
from tests import forked
from tests.checkpoints import fill, prepared, resumed_step
from tests.test_faults_save import KINDS, PUBLISHED, save_one, save_twice


def begin(live, background, agreed, root, step):
    """Fill with a step and begin to save it beside."""
    fill(live, step)
    request = write.SaveRequest(folder.step_folder(root, step), step, "test", in_series=True, keep_last=2)
    background.start(write.prepare(live, "sharded", request, agreed))


def save_beside(root, fault):
    """Step 1 saved beside; step 2 meets a fault while training goes on; where and what each rank is answers."""
    agreed, background = control.start(60.0), async_save.AsyncSave(control.start_background(60.0))
    live = prepared("fsdp")
    begin(live, background, agreed, root, 1)
    background.wait(agreed)
    forked.arm(fault)
    begin(live, background, agreed, root, 2)
    for step in range(3, 30):
        fill(live, step)
    try:
        background.wait(agreed)
    except CheckpointSaveError as error:
        return str(error), folder.read_latest(root)
    return "saved", folder.read_latest(root)


@pytest.mark.slow
@pytest.mark.fault_row(7)
@pytest.mark.parametrize("point", ["stage", "write", "fsync", "manifest"])
def test_killed_while_saving_beside_the_old_step_is_whole(tmp_path, point):
    outcomes = forked.run(2, save_beside, tmp_path, f"{point}:*:kill")
    assert f"{point}.0" in outcomes[0].marks and outcomes[0].exit_code == -signal.SIGKILL
    assert folder.read_latest(tmp_path) == "step-00000001"
    assert resumed_step(tmp_path) == 1


@pytest.mark.fault_row(8)
@pytest.mark.parametrize("fault", ["write:1:raise=ENOSPC", "manifest:0:raise=EIO", "stage:1:raise=ENOMEM"])
@pytest.mark.slow
def test_a_failure_beside_training_is_answers_to_all_ranks_at_once(tmp_path, fault):
    outcomes = forked.run(2, save_beside, tmp_path, fault)
    assert outcomes[0].value == outcomes[1].value, outcomes
    answers, latest = outcomes[0].value
    assert f"rank {fault.split(':')[1]} (host" in answers and "Last checkpoint: step 1" in answers
    assert latest == "step-00000001" and resumed_step(tmp_path) == 1


def save_and_leave(root):
    """The script ends right after it began to save: nobody waits."""
    agreed, background = control.start(60.0), async_save.AsyncSave(control.start_background(60.0))
    begin(prepared("fsdp"), background, agreed, root, 1)
    background.last_words()


@pytest.mark.slow
@pytest.mark.fault_row(7)
def test_what_was_begun_is_committed_before_the_end(tmp_path):
    outcomes = forked.run(2, save_and_leave, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert resumed_step(tmp_path) == 1


def train_beside_a_slow_writer(root, timeout_s):
    training = dist.new_group(timeout=timedelta(seconds=timeout_s))
    agreed, background = control.start(120.0), async_save.AsyncSave(control.start_background(120.0))
    live, rounds = prepared("fsdp"), 0
    begin(live, background, agreed, root, 1)
    running = torch.ones(())
    while running:
        running = torch.tensor(float(any(one.name == "shardkit-save" for one in threading.enumerate())))
        dist.all_reduce(running, group=training)
        rounds += 1
    background.wait(agreed)
    return rounds


@pytest.mark.faults
@pytest.mark.fault_row(31)
def test_a_slow_writer_is_no_hang(tmp_path):
    outcomes = forked.run(2, train_beside_a_slow_writer, tmp_path, 5, fault="write:1:sleep=15")
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].value == outcomes[1].value > 2
    assert resumed_step(tmp_path) == 1


def save_for_ever(root, mode):
    strategy, kind = KINDS[mode]
    live, agreed = prepared(strategy), control.start(60.0)  # one group: making one waits long for a rank that is gone
    for step in range(1, 10_000):
        fill(live, step)
        request = write.SaveRequest(folder.step_folder(root, step), step, "test", in_series=True, keep_last=2)
        write.save(live, kind, request, agreed)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.fault_row(2)
@pytest.mark.parametrize("mode", list(KINDS))
def test_killed_at_random_times(tmp_path, mode):
    """70 random kills of each kind, of both ranks or of one: what is there always loads, all of one step."""
    generator = random.Random(mode)
    unharmed = 0
    for number in range(70):
        root = tmp_path / str(number)
        root.mkdir()
        killed = forked.run_and_kill(2, save_for_ever, root, mode, generator=generator, ready=root / "step-00000001")
        assert killed
        step = resumed_step(root)
        assert step >= 1
        unharmed += not any(path.name.startswith(".tmp") for path in root.iterdir())
    assert unharmed < 70, "no kill met a save"


# Row 41: the rows above must notice when a step of the protocol is taken out.


def without(change, scenario, *args):
    """Run a scenario with the protocol changed."""
    change()
    return scenario(*args)


def no_agreement():
    """What a rank wrote is answers to the others, but not whether it failed."""

    def hopeful(agreed, action, answer=lambda result: None, judge=lambda answers: None):
        try:
            result = action()
        except OSError:
            result = {}
        answers = agreed.exchange(answer(result))
        verdict = agreed.share(judge(answers) if agreed.rank == 0 else None)
        return control.Attempt(result, answers, verdict, "")

    control.ControlGroup.attempt = hopeful


def no_rename():
    """Write at once into the final name."""
    folder.temporary_folder = lambda final, save_id: final
    commit.is_taken = opening.is_taken = lambda final: False
    disk.publish = lambda temporary, final: None
    write.after_commit = lambda *rest: None


def retention_first():
    found = write.commit

    def commit_after_retention(prepared, written):
        retention.expendable = lambda root, *rest: folder.steps(root)
        retention.apply(prepared.request.final.parent, 1)
        return found(prepared, written)

    write.commit = commit_after_retention


@pytest.mark.slow
@pytest.mark.fault_row(41)
def test_without_an_agreement_a_row_goes_red(tmp_path):
    outcomes = forked.run(2, without, no_agreement, save_twice, tmp_path, "sharded", "write:1:raise=ENOSPC")
    assert "write.1" in outcomes[0].marks
    assert not any("No space left on device" in (outcome.value or "") for outcome in outcomes), "row 14 notices"


@pytest.mark.fault_row(41)
def test_without_a_rename_a_row_goes_red(tmp_path):
    outcomes = forked.run(2, without, no_rename, save_twice, tmp_path, "sharded", "fsync:*:kill")
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert [found.step for found in folder.steps(tmp_path)] == [2, 1], "a half-written step bears a final name"


@pytest.mark.fault_row(41)
def test_without_its_self_digest_a_row_goes_red(tmp_path, monkeypatch):
    save_one(prepared("plain"), tmp_path, 1, "sharded")
    path = tmp_path / "step-00000001"
    text = (path / manifest.NAME).read_text()
    (path / manifest.NAME).write_text(text.replace('"step":1,', '"step":5,'))
    with pytest.raises(CheckpointError, match="its digest does not match"):
        manifest.read(path)
    source = inspect.getsource(manifest.from_bytes)
    assert source.count("if stated != ") == 1
    changed = dict(vars(manifest))
    exec(source.replace("if stated != ", "if False and stated != "), changed)
    monkeypatch.setattr(manifest, "from_bytes", changed["from_bytes"])
    assert manifest.read(path).step == 5, "row 11 would have noticed"


@pytest.mark.slow
@pytest.mark.fault_row(41)
def test_with_retention_first_a_row_goes_red(tmp_path):
    outcomes = forked.run(2, without, retention_first, save_twice, tmp_path, "sharded", "manifest:0:kill")
    assert "manifest.0" in outcomes[0].marks
    assert folder.newest_valid(tmp_path)[0] is None, "rows 1 and 15 would have noticed: nothing is left"


def trace_of_a_save(root):
    """The order of fsync, close and rename calls in one save, with what they were about."""
    calls = []
    paths = {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "replace")}

    def opened(path, *args, **kwargs):
        descriptor = real["open"](path, *args, **kwargs)
        paths[descriptor] = str(path)
        return descriptor

    def synced(descriptor):
        calls.append(("fsync", Path(paths[descriptor]).name))
        real["fsync"](descriptor)

    os.open, os.fsync = opened, synced
    os.rename = lambda a, b: (calls.append(("rename", Path(b).name)), real["rename"](a, b))[1]
    live = prepared("plain")
    save_one(live, root, 1, "sharded")
    return calls


@pytest.mark.fault_row(41)
def test_everything_is_on_disk_before_the_name_is_given(tmp_path):
    (outcome,) = forked.run(1, trace_of_a_save, tmp_path)
    assert outcome.error is None, outcome.error
    calls = [(what, name.split("-step-")[0] if name.startswith(".tmp") else name) for what, name in outcome.value]
    named = calls.index(["rename", "step-00000001"] if isinstance(calls[0], list) else ("rename", "step-00000001"))
    before, after = [name for what, name in calls[:named] if what == "fsync"], calls[named:]
    written = {path.name for path in (tmp_path / "step-00000001").rglob("*") if path.is_file()}
    assert written <= set(before), "a file was not on disk when the checkpoint got its name"
    assert {"model", "optim", "objects", "state", ".tmp"} <= set(before), "a folder was not"
    last_file = max(number for number, name in enumerate(before) if name in written)
    assert before[last_file] == manifest.NAME, "the manifest must come after all files"
    assert ("fsync", tmp_path.name) in after, "the name itself must be on disk before the save returns"


def test_published_points_are_those_after_the_rename():
    points = list(faults.SAVE_POINTS)
    assert set(PUBLISHED) == set(points[points.index("rename") + 1 :])


def test_the_matrix_on_paper_is_the_one_in_the_tests():
    """Every file of these tests that the page names for a row marks that row, and no row is missing."""
    folder_of_tests = Path(__file__).parent
    page = (folder_of_tests.parent / "docs/reference/fault-matrix.md").read_text()
    rows = {int(number): tests for number, tests in re.findall(r"^\| (\d+) \|.*\| (.*) \|$", page, re.MULTILINE)}
    assert sorted(rows) == list(range(1, 48))
    for number, tests in rows.items():
        for name in re.findall(r"`(test_\w+)`", tests):
            assert f"fault_row({number})" in (folder_of_tests / f"{name}.py").read_text(), (number, name)
