"""Saving beside training: what is saved is the state at the call, whatever the loop does next."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from shardkit import Accelerator, ProjectConfiguration
from shardkit.checkpoint.files.verify import damages, open_checkpoint
from shardkit.checkpoint.saving import async_save, write
from shardkit.distributed import control
from shardkit.errors import CheckpointSaveError
from shardkit.runtime.checkpoints import separate_checkpoints
from tests import checkpoints
from tests.ranks import log_lines


@pytest.fixture
def live():
    built = checkpoints.build("plain")
    checkpoints.train(built, 2)
    return built


@pytest.fixture
def background():
    return async_save.AsyncSave(control.start_background(60.0))


def begin(live, background, path):
    request = write.SaveRequest(path, 2, "test")
    background.start(write.prepare(live, "sharded", request, background.control), live.optimizers)


def saved_digest(path):
    found = checkpoints.build("plain", seed=1)
    checkpoints.load(found, path)
    return checkpoints.digest_of(found)


@pytest.mark.slow
def test_a_step_waits_until_its_state_is_copied(live, background, tmp_path, monkeypatch):
    """The thread copies no optimizer state before a step was asked for; a step that did not wait would change it."""
    asked, stepped, real = threading.Event(), threading.Event(), background._copied

    def late(section, chunk, tensor):
        if threading.current_thread().name == "shardkit-save":
            assert asked.wait(60)
            stepped.wait(0.2)
        return real(section, chunk, tensor)

    monkeypatch.setattr(background, "_copied", late)
    (optimizer,) = live.optimizers
    optimizer.register_step_pre_hook(lambda *_: asked.set())
    optimizer.register_step_post_hook(lambda *_: stepped.set())
    expected = checkpoints.digest_of(live)
    begin(live, background, tmp_path / "saved")
    checkpoints.train(live, 2, first=2)
    assert stepped.is_set()
    background.wait(background.control)
    assert checkpoints.digest_of(live) != expected
    assert saved_digest(tmp_path / "saved") == expected


def test_weights_and_settings_may_change_at_once(live, background, tmp_path):
    expected, rates = checkpoints.digest_of(live), [group["lr"] for group in live.optimizers[0].param_groups]
    begin(live, background, tmp_path / "saved")
    with torch.no_grad():
        for parameter in live.models[0].parameters():
            parameter.data.zero_()
    for group in live.optimizers[0].param_groups:
        group["lr"] = 5.0
    background.wait(background.control)
    found = checkpoints.build("plain", seed=1)
    checkpoints.load(found, tmp_path / "saved")
    assert checkpoints.digest_of(found) == expected
    assert [group["lr"] for group in found.optimizers[0].param_groups] == rates


def test_optimizer_state_changed_by_hand_meanwhile_is_noticed(live, background, tmp_path, monkeypatch):
    changed, real = threading.Event(), background._copied

    def late(section, chunk, tensor):
        if threading.current_thread().name == "shardkit-save":
            assert changed.wait(60)
        return real(section, chunk, tensor)

    monkeypatch.setattr(background, "_copied", late)
    begin(live, background, tmp_path / "saved")
    parameter = next(iter(live.optimizers[0].state))
    live.optimizers[0].state[parameter]["exp_avg"].zero_()
    changed.set()
    with pytest.raises(CheckpointSaveError, match=r"exp_avg: the script changed optimizer state .* blocking=True"):
        background.wait(background.control)
    assert not (tmp_path / "saved").exists()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, as some are written: torch's constructor never ran, so nothing hooks its step."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self):
        for row in self.state.values():
            row["exp_avg"].data.zero_()


def test_the_load_of_a_single_model_waits_for_the_save_in_flight(alone, tmp_path):
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    run = accelerator._run
    separate_checkpoints.save_only_model(run, model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state", blocking=False)
    separate_checkpoints.load_only_model(run, model, tmp_path / "model")
    assert run.saving.background._thread is None
    accelerator.end_training()


@pytest.mark.slow
def test_a_script_may_change_its_folder_while_it_is_saved(alone, tmp_path, monkeypatch):
    """The project is named relative to the folder in which the script began to save."""
    for name in ("begun", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "begun")
    project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"}, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 2))
    monkeypatch.setenv("SHARDKIT_FAULT", "open:0:sleep=0.3")
    with log_lines() as lines:
        saved = accelerator.save_state(blocking=False)
        monkeypatch.chdir(tmp_path / "elsewhere")
        accelerator.end_training()
    assert saved == tmp_path / "begun/run/checkpoints/step-00000000" and not damages(open_checkpoint(saved))
    assert any("step 0 saved in run/checkpoints/step-00000000 (" in line for line in lines)


def test_an_optimizer_without_hooks_is_copied_first(live, background, tmp_path):
    expected = checkpoints.digest_of(live)
    live.optimizers[0] = Wrapper(live.optimizers[0])
    begin(live, background, tmp_path / "saved")
    live.optimizers[0].step()
    background.wait(background.control)
    assert saved_digest(tmp_path / "saved") == expected


def test_nothing_is_left_on_the_optimizer(live, background, tmp_path):
    for number in range(2):
        begin(live, background, tmp_path / str(number))
        background.wait(background.control)
        assert not live.optimizers[0]._optimizer_step_pre_hooks
    assert not [thread for thread in threading.enumerate() if thread.name == "shardkit-save"]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_the_copies_are_freed_with_the_run(ends, alone, tmp_path):
    """One process that trains many models one after the other, as a sweep does."""
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "saved", blocking=False)
    background = weakref.ref(accelerator._run.saving.background)
    background()._thread.join()
    if ends:
        accelerator.end_training()
    del accelerator, model, optimizer
    gc.collect()
    assert background() is None


def test_an_error_that_nobody_awaited_is_logged_at_exit(live, background, tmp_path, monkeypatch):
    registered = []
    monkeypatch.setattr(async_save.atexit, "register", registered.append)
    monkeypatch.setenv("SHARDKIT_FAULT", "write:0:raise=ENOSPC")
    begin(live, background, tmp_path / "saved")
    background._thread.join()
    (action,) = registered
    with log_lines() as lines:
        action()
    assert len(lines) == 1 and "No space left on device" in lines[0]


LEAVES = """
import sys
from pathlib import Path
from shardkit.checkpoint.saving import async_save, write
from shardkit.distributed import control
from tests import checkpoints

live = checkpoints.build("plain")
checkpoints.train(live, 1)
request = write.SaveRequest(Path(sys.argv[1]), 1, "test", digest="sha256")
background = async_save.AsyncSave(control.start_background(60.0))
background.start(write.prepare(live, "sharded", request, background.control))
"""


@pytest.mark.slow
def test_a_save_that_hashes_in_a_thread_outlasts_the_script(tmp_path):
    """At the end of a script Python stops its executors, and waits for the save only after that."""
    surroundings = {**os.environ, "SHARDKIT_FAULT": "write:0:sleep=3", "SHARDKIT_FAULT_MARKS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LEAVES, tmp_path / "saved"], env=surroundings, timeout=120)
    assert done.returncode == 0 and (tmp_path / "write.0").exists()
    assert not damages(open_checkpoint(tmp_path / "saved"))
