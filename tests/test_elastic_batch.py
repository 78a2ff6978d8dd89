"""The global batch of an elastic run: loops and scripts that do not keep it are told so; those that do are left alone.

One rank is a world without the other machines where SHARDKIT_FULL_WORLD_SIZE says 2.
"""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator, ProjectConfiguration
from shardkit.errors import UsageError
from tests.ranks import log_lines

CPU = {"distributed_type": "NO", "use_cpu": True}


def trained(batch_size: int, backwards: int = 1, folder: str | None = None, **arguments) -> list[str]:
    """Four micro-batches in a loop without `accumulate()`, with a step after every so many; what was warned of. With a
    folder the newest state is loaded before, and one is saved after."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(config=CPU, project_config=project, **arguments)
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(32, 2)), batch_size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with log_lines(level=logging.WARNING) as told:
        if folder and Path(folder).exists():
            accelerator.load_state()
        for number, (batch,) in zip(range(4), loader, strict=False):
            accelerator.backward(model(batch).mean())
            if (number + 1) % backwards == 0:
                optimizer.step()
                optimizer.zero_grad()
        if folder:
            accelerator.save_state()
    accelerator.end_training()
    return told


def ordinary(_: int) -> None:
    (told,) = trained(4, gradient_accumulation_steps=2)
    assert told == (
        "accumulate: gradient_accumulation_steps only divides losses (got an optimizer step after 1 of 2 micro-"
        "batches, outside of accumulate()); put forward, backward and step into `with accelerator.accumulate(model):`."
    )
    assert trained(4) == []
    assert trained(4, backwards=2, gradient_accumulation_steps=2) == []  # it counts its micro-batches itself
    assert trained(32, gradient_accumulation_steps=2) == []  # the epoch's last window


def in_half_of_an_elastic_run(path: str) -> None:
    os.environ["SHARDKIT_FULL_WORLD_SIZE"] = "2"
    try:
        with pytest.raises(
            UsageError, match=r"elastic: the global batch of all machines is not kept \(got an optimizer"
        ):
            trained(4)
        assert trained(4, backwards=2) == []
        assert trained(4, split_batches=True, folder=f"{path}/split") == []
        assert trained(4, split_batches=True, folder=f"{path}/split") == []
        assert trained(4, backwards=2, folder=f"{path}/own") == []
        (told,) = trained(8, backwards=2, folder=f"{path}/own")
        assert told.startswith(
            "elastic: the global batch has changed (got batches of 8 samples in a world of 1, 4 in one of 1 in the "
            "checkpoint); give a batch_size that"
        )
    finally:
        del os.environ["SHARDKIT_FULL_WORLD_SIZE"]


def in_all_of_an_elastic_run(_: int) -> None:
    os.environ["SHARDKIT_FULL_WORLD_SIZE"] = "1"
    try:
        (told,) = trained(4)
        assert told == (
            "elastic: the global batch would not be kept where machines are lost, and the run would end (got an "
            "optimizer step after 1 of 1 micro-batches, outside of accumulate()); put forward, backward and step into "
            "`with accelerator.accumulate(model):`, or give batches of all ranks: Accelerator(split_batches=True). A "
            "loop that counts accelerator.gradient_accumulation_steps itself goes on."
        )
        assert trained(4, split_batches=True) == []
    finally:
        del os.environ["SHARDKIT_FULL_WORLD_SIZE"]


def test_a_loop_that_the_first_lost_machine_would_end_is_told_so_while_all_are_there(ranks):
    ranks.run(1, in_all_of_an_elastic_run, 0)


def test_a_loop_without_accumulate_is_told_that_its_losses_are_divided_all_the_same(ranks):
    ranks.run(1, ordinary, 0)


def test_a_loop_that_does_not_keep_the_batch_of_all_machines_is_refused_and_a_changed_batch_is_said(ranks, tmp_path):
    ranks.run(1, in_half_of_an_elastic_run, str(tmp_path))
