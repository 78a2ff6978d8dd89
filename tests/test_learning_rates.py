"""Learning rates and batches that differ between ranks: rank 0 says so soon, once; equal ones are never mentioned."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.runtime.likely_mistakes import learning_rates
from tests.agreement import compared_often
from tests.ranks import log_lines


@compared_often()
def said_of_rates(strategy: int, how: str) -> list[str]:
    """What this rank logs of learning rates in half a second of steps."""
    config = Config(use_cpu=True, num_processes=dist.get_world_size(), fsdp_config={"fsdp_sharding_strategy": strategy})
    with log_lines() as lines:
        _train(Accelerator(config=config), how)
    return [line for line in lines if "learning rates" in line]


def _train(accelerator: Accelerator, how: str) -> None:
    model = torch.nn.Linear(4, 4)
    loader = torch.utils.data.DataLoader(torch.ones(400, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=0)
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if how == "by its own metric" and number % 5 == 0:
            plateau.step(number if accelerator.process_index else 1 / (1 + number))  # rank 0's improves
        elif how == "rounded":
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + 1e-14 * accelerator.process_index)
        time.sleep(0.005)
    accelerator.end_training()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_schedule_by_each_ranks_own_metric_is_noticed_once(ranks, strategy):
    of_rank_0, of_rank_1 = ranks.run(2, said_of_rates, strategy, "by its own metric")
    assert of_rank_0 == [
        "optimizer: learning rates of rank 1 differ from rank 0's, so each rank's optimizer makes other steps; set "
        "learning rates alike on all ranks, and give a schedule a metric that is the same on all "
        "(accelerator.reduce(metric, 'mean'))."
    ]
    assert of_rank_1 == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alike", pytest.param("rounded", marks=pytest.mark.slow)])
def test_nothing_is_said_of_equal_learning_rates(ranks, how):
    assert ranks.run(2, said_of_rates, 1, how) == [[], []]


@compared_often()
def said_of_batches(strategy: int, how: str) -> list[str]:
    """What this rank logs of batches in 120 steps, of epochs of 50."""
    config = Config(use_cpu=True, num_processes=dist.get_world_size(), fsdp_config={"fsdp_sharding_strategy": strategy})
    with log_lines() as lines:
        accelerator = Accelerator(config=config)
        model = torch.nn.Linear(4, 4)
        loader = torch.utils.data.DataLoader(torch.ones(200, 4), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        steps = 0
        while steps < 120:
            for number, batch in enumerate(loader):
                if how == "leaves out" and number == 20 and accelerator.process_index:
                    continue
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.005)
                steps += 1
                is_left = how == "left by all" or (how == "left" and accelerator.process_index == 1)
                if steps == 120 or (is_left and number == 20):
                    break
        accelerator.end_training()
    return [line for line in lines if line.startswith("data: ")]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left", pytest.param("leaves out", marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_at_another_batch_is_told_once(ranks, strategy, how):
    """And not taken for one that used other modules, which is compared at the same number of steps."""
    of_rank_0, of_rank_1 = ranks.run(2, said_of_batches, strategy, how)
    assert [line.partition(":")[2].partition(":")[0] for line in of_rank_0] == [
        " rank 1 is at another batch than rank 0"
    ]
    assert of_rank_1 == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left by all", pytest.param("alike", marks=pytest.mark.slow)])
def test_nothing_is_said_of_equal_batches(ranks, how):
    assert ranks.run(2, said_of_batches, 1, how) == [[], []]


def test_the_number_of_learning_rates():
    def number(*rates: object) -> float:
        return learning_rates.as_number([SimpleNamespace(param_groups=[{"lr": rate} for rate in rates])])

    assert number(0.1, 0.2) == pytest.approx(0.5)
    assert number(0.1, 0.2) != number(0.2, 0.1)
    assert number(torch.tensor(0.5)) == 0.5
    assert number(torch.tensor(0.5, device="meta")) == 0.0  # one that is in a device's memory
    assert number(float("nan")) == 0.0
    assert number(None, 0.5) == 1.0  # Adafactor's own rate
    assert learning_rates.as_number([SimpleNamespace(param_groups=[{}])]) == 0.0
