"""A signal to one rank stops all at the same step, in loops of any form, and nothing is lost without a word."""

import logging
import logging.handlers
import os
import signal
from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardkit import Accelerator, ProjectConfiguration, env
from shardkit.config import files
from shardkit.errors import Preempted
from shardkit.launch import names
from shardkit.runtime.steps import preemption
from tests.training import Points, loss_of, parts


def run_epochs(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any) -> None:
    """In the second batch, rank 1 gets a signal."""
    for number, batch in enumerate(chain.from_iterable(repeat(loader, 1000))):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if number == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def evaluate(accelerator: Accelerator, loader: Any) -> None:
    """In the second batch, rank 1 gets a signal. A loop without an exchange may be one rank's own."""
    if dist.get_rank() == 0:
        list(loader)
    for number, batch in enumerate(chain.from_iterable(repeat(loader, 1000))):
        accelerator.gather_for_metrics(batch["index"])
        if number == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def told_to_stop_in_evaluation(path: str) -> str:
    env.update({env.RESOLVED: path})
    try:
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(Points(32), batch_size=4))
        with pytest.raises(Preempted) as caught:
            evaluate(accelerator, loader)
        return str(caught.value)
    finally:
        preemption.uninstall()


def told_to_stop(path: str) -> tuple[str, int, int, float, list[str]]:
    env.update({env.RESOLVED: path})
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("shardkit").addHandler(heard)
    try:
        accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=None))
        model, optimizer, loader, scheduler = parts(32, 4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        with pytest.raises(Preempted) as caught:
            run_epochs(accelerator, model, optimizer, loader, scheduler)
        warnings = [record.getMessage() for record in heard.buffer if record.levelno == logging.WARNING]
        code, step = caught.value.exit_code, accelerator.counters.step
        return str(caught.value), code, step, scheduler.scheduler.last_epoch, warnings
    finally:
        logging.getLogger("shardkit").removeHandler(heard)
        preemption.uninstall()


@pytest.mark.slow
@pytest.mark.requirement("A9")
def test_a_signal_to_one_rank_stops_all_at_the_same_boundary(ranks, tmp_path):
    path = tmp_path / "resolved.yaml"
    text = "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nshardkit: {checkpoint: {resume: auto}}\n"
    files.write(files.read_text(text).config, path)
    warnings = []
    steps = set()
    for message, code, step, scheduled, heard in ranks.run(2, told_to_stop, str(path)):
        assert message.startswith(
            f"launch: stopped by a signal after step {step}; nothing was saved, because the script"
        )
        assert (code, scheduled) == (75, step)
        steps.add(step)
        warnings += heard
    assert len(steps) == 1 and min(steps) >= 2
    assert warnings == [
        "checkpoint.resume: nothing was resumed (got auto), and this run trains from the start; "
        "call accelerator.resume() after prepare."
    ], "one rank says it, once"
    assert all("after step 0" in message for message in ranks.run(2, told_to_stop_in_evaluation, str(path)))


@pytest.mark.slow
def test_a_resumed_run_that_prepares_a_larger_model_later_is_not_told_that_nothing_was_resumed(alone, tmp_path, caplog):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    settings = {"use_cpu": True, "shardkit": {"checkpoint": {"resume": "auto"}}}
    accelerator = Accelerator(config=settings, project_config=project)
    for size in (1, 2):
        model = nn.Linear(1, size)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if size == 1:
            accelerator.save_state()
            assert accelerator.resume()
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
        accelerator.free_memory()
    assert "nothing was resumed" not in caplog.text


@pytest.mark.parametrize(
    ("loop", "project_dir", "is_signalled", "is_told"),
    [
        ("plain", "run", False, True),
        ("plain", None, False, False),
        ("plain", None, True, True),
        ("backward", "run", True, False),
        ("loader", "run", False, False),
        ("two optimizers", "run", False, False),
    ],
)
def test_a_loop_without_step_boundaries_is_told_that_no_signal_stops_it(
    tmp_path, monkeypatch, capsys, loop, project_dir, is_signalled, is_told
):
    settings = {"use_cpu": True, "distributed_type": "NO"}
    files.write(files.read_text("distributed_type: 'NO'\nuse_cpu: true\n").config, tmp_path / "resolved.yaml")
    monkeypatch.setenv(env.RESOLVED, str(tmp_path / "resolved.yaml"))
    folder = project_dir and str(tmp_path / project_dir)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=bool(folder))
    try:
        accelerator = Accelerator(config=settings, project_config=project)
        model = torch.nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(1 + (loop == "two optimizers"))]
        model, *optimizers = accelerator.prepare(model, *optimizers)
        batches = accelerator.prepare(DataLoader(Points(4))) if loop in ("loader", "two optimizers") else range(4)
        if is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted) if loop == "backward" else nullcontext():
            for _ in batches:
                for optimizer in optimizers:
                    loss = model(torch.ones(1, 2)).sum()
                    accelerator.backward(loss) if loop == "backward" else loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        preemption.uninstall()
    assert capsys.readouterr().err.count("stop signals: this loop cannot save and stop at one") == is_told


@pytest.mark.slow
@pytest.mark.parametrize(("saved_at", "is_told"), [(2, True), (3, False), (0, False)])
def test_a_run_that_ends_after_its_newest_checkpoint_says_so(tmp_path, capsys, saved_at, is_told):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"}, project_config=project)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 4):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, saved_at) and saved_at:
            accelerator.save_state(blocking=False)
    accelerator.end_training()
    told = "the run ends at step 3, but the newest checkpoint for --resume auto is of step 2" in capsys.readouterr().err
    assert told == is_told


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_run_that_saves_nothing_new_says_so(tmp_path, capsys, steps):
    for until in (1, steps):
        project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"}, project_config=project)
        model = torch.nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if is_resumed := list(tmp_path.iterdir()) != []:
            accelerator.load_state()
        while accelerator.counters.step < until:
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if not is_resumed:
            accelerator.save_state()
        accelerator.end_training()
    told = "the run ends at step 3, but the newest checkpoint for --resume auto is of step 1" in capsys.readouterr().err
    assert told == (steps == 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "resume", "is_told"), [("1", "never", True), ("0", "never", False), ("1", "auto", False)]
)
def test_a_run_or_a_restart_by_torchrun_that_begins_again_beside_checkpoints_says_so(
    tmp_path, monkeypatch, capsys, count, resume, is_told
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    settings = {"use_cpu": True, "distributed_type": "NO", "shardkit": {"checkpoint": {"resume": resume}}}
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    for is_second in (False, True):
        accelerator = Accelerator(config=settings, project_config=project)
        accelerator.prepare(torch.nn.Linear(2, 2))
        assert accelerator.resume() == (is_second and resume == "auto")
        told = capsys.readouterr().err
        assert ("this is a restart" in told) == (is_second and is_told)
        is_replaced = is_second and count == "0"
        assert ("its checkpoints will take the place of those" in told) == is_replaced
        if not is_second:
            accelerator.save_state()
        accelerator.end_training()


@pytest.mark.slow
def test_after_the_end_of_its_last_run_ctrl_c_interrupts_a_script(tmp_path, monkeypatch):
    files.write(files.read_text("distributed_type: 'NO'\nuse_cpu: true\n").config, tmp_path / "resolved.yaml")
    monkeypatch.setenv(env.RESOLVED, str(tmp_path / "resolved.yaml"))
    monkeypatch.setenv(names.LAUNCHER_PID, str(os.getpid()))
    first, second = (Accelerator(config={"use_cpu": True, "distributed_type": "NO"}) for _ in range(2))
    try:
        first.end_training()
        signal.raise_signal(signal.SIGINT)  # the second run would stop at its next step
        second.end_training()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # the script has the time to finish
        Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
        signal.raise_signal(signal.SIGINT)
    finally:
        preemption.uninstall()
