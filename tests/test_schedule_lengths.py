"""Schedules whose length was counted by a loader before `prepare`: rank 0 says so once; others are never mentioned."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from shardkit import Accelerator
from shardkit.config.schema import Config
from tests.ranks import log_lines

EPOCHS, BATCHES = 3, 12


def _decayed(step: int, *, num_training_steps: int) -> float:
    return max(0.0, 1 - step / num_training_steps)


def _warmed(optimizer: Any, steps: int) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, steps - 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])


SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "OneCycleLR": lambda optimizer, steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps),
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "LambdaLR": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, partial(_decayed, num_training_steps=steps)),
    "SequentialLR": _warmed,
}


def said_of_schedule(kind: str, how: str = "", size: int = 1) -> list[str]:
    """What this rank logs of its schedule in four steps. `size`: micro-batches of a step."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = Config(use_cpu=True, num_processes=world, shardkit={"gradient_accumulation_steps": size})
    with log_lines() as lines:
        _train(Accelerator(config=config, split_batches=how == "split batches"), SCHEDULES[kind], how)
    return [line for line in lines if "schedule" in line]


def _train(accelerator: Accelerator, schedule: Callable[[Any, int], Any], how: str) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(4 * BATCHES, 4), batch_size=4)
    if how == "counted after prepare":
        loader = accelerator.prepare(loader)
    epochs = 4 if how == "4 epochs" else EPOCHS
    steps = epochs * len(loader) // accelerator.gradient_accumulation_steps + (how == "counted otherwise")
    scheduler = schedule(optimizer, steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    while accelerator.counters.step < 4:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                if how != "once an epoch":
                    scheduler.step()
                optimizer.zero_grad()
        if how == "once an epoch":
            scheduler.step()
    accelerator.end_training()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_as_long_as_epochs_before_prepare_is_told_once(ranks, kind):
    of_rank_0, of_rank_1 = ranks.run(2, said_of_schedule, kind)
    assert of_rank_0 == [
        f"schedule: {kind} has 36 steps, as many as 3 epochs had with the loader before prepare (got 6 steps an epoch "
        "now, 12 before), so 3 epochs would end in its middle; prepare the loader first and count by its len, or keep "
        "the script's batch size for all ranks together: Accelerator(split_batches=True). For a training of 36 steps "
        "it is right."
    ]
    assert of_rank_1 == []


@pytest.mark.parametrize("how", ["counted after prepare", "counted otherwise", "split batches", "once an epoch"])
def test_nothing_is_said_of_other_schedules(ranks, how):
    assert ranks.run(2, said_of_schedule, "CosineAnnealingLR", how) == [[], []]


def test_accumulated_steps_are_counted(ranks):
    (said,), _ = ranks.run(2, said_of_schedule, "OneCycleLR", "", 4)
    assert "OneCycleLR has 9 steps" in said and "(got 2 steps an epoch now, 3 before)" in said
    assert "count by its len, divided by gradient_accumulation_steps, or" in said


@pytest.mark.slow
def test_one_process_is_told_nothing():
    assert said_of_schedule("OneCycleLR") == said_of_schedule("OneCycleLR", "4 epochs", size=4) == []
