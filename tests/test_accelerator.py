"""The Accelerator on live ranks: a user's whole loop equals plain torch in one process on the same global batches."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from shardkit import Accelerator
from tests.training import DDP, FULL, Adapted, Model, Points, Stream, loop, loss_of, parts, plain, weights_of

CASES = [
    pytest.param(1, FULL, id="1-full", marks=pytest.mark.slow),
    pytest.param(2, FULL, id="2-full"),
    pytest.param(2, DDP, id="2-ddp"),
    pytest.param(4, FULL, id="4-full", marks=pytest.mark.slow),
    pytest.param(
        4,
        FULL | {"fsdp_config": {"fsdp_sharding_strategy": 4}, "shardkit": {"mesh": {"shard_size": 2}}},
        id="4-hybrid",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.requirement("D3")
@pytest.mark.parametrize(("world_size", "config"), CASES)
def test_the_whole_loop_equals_one_process(ranks, world_size, config):
    length, global_batch, accumulation, epochs = 56, 8, 3, 2  # 7 batches an epoch: windows of 3, 3 and 1
    expected = plain(length, global_batch, accumulation, epochs)
    for found in ranks.run(world_size, loop, config, length, global_batch // world_size, accumulation, epochs):
        torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
        assert found["rates"] == pytest.approx(expected["rates"])
        assert found["counted"] == (6, 0, length * epochs)


def samples_counted(kind: str) -> list[int]:
    """The samples counted after each of the first steps, in a loop that reads 4 batches of 2 for one step."""
    has_windows = kind != "by hand"
    accelerator = Accelerator(config=FULL, gradient_accumulation_steps=4 if has_windows else 1)
    model, optimizer, loader, _ = parts(64, 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counted, batches = [], iter(loader)
    if kind == "after a skip":
        next(batches), next(batches)
    while len(counted) < 3:
        window = [next(batches) for _ in range(4)]
        for batch in window:
            if has_windows:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
            else:
                loss_of(model, batch).backward()
        if not has_windows:
            optimizer.step()
            optimizer.zero_grad()
        counted.append(accelerator.counters.samples_seen)
    return counted


@pytest.mark.slow
def test_all_samples_are_counted_where_a_loop_reads_the_batches_of_a_step_ahead(ranks):
    for kind in ("read ahead", "after a skip", "by hand"):
        assert ranks.run(2, samples_counted, kind) == [[16, 32, 48]] * 2, kind


def rates_with_overflows(calls: str) -> float:
    """The learning rate, over the first one, after two epochs of three steps, the last of each of which fp16 skips."""
    accelerator = Accelerator(config={"use_cpu": True, "num_processes": 1, "mixed_precision": "fp16"})
    model, optimizer, _, schedule = parts(8, 4)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for step in range(6):
        loss = loss_of(model, default_collate([Points(8)[number] for number in range(4)]))
        accelerator.backward(loss * (float("inf") if step % 3 == 2 else 1.0))
        optimizer.step()
        if calls == "each step" or step % 3 == 2:
            schedule.step()
        optimizer.zero_grad()
    return round(schedule.get_last_lr()[0] / 0.05, 6)


def test_a_schedule_leaves_out_steps_that_fp16_skipped_but_no_epochs(ranks):
    assert ranks.run(1, rates_with_overflows, "each step") == [round(0.9**4, 6)]
    assert ranks.run(1, rates_with_overflows, "each epoch") == [round(0.9**2, 6)]


def variation(kind: str) -> list[torch.Tensor]:
    """The loop written in another way, three micro-batches a step."""
    accelerator = Accelerator(config=FULL, gradient_accumulation_steps=3)
    model, optimizer, loader, _ = parts(56, 4, Adapted if kind == "adapters" else Model)
    if kind == "stream":
        loader = DataLoader(Stream(56), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # built on the prepared optimizer
    scheduler = accelerator.prepare(scheduler)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                if kind == "zero_grad first":
                    optimizer.zero_grad()
                accelerator.backward(loss_of(model, batch))
                if kind != "step outside":
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    scheduler.step()
                if kind not in ("zero_grad first", "step outside"):
                    optimizer.zero_grad()
            if kind == "step outside":
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.requirement("N4")
@pytest.mark.parametrize("kind", ["zero_grad first", "step outside", "stream", "adapters"])
def test_other_ways_to_write_the_loop_equal_one_process_too(ranks, kind):
    model = Adapted if kind == "adapters" else Model
    expected = plain(56, 8, 3, 2, model)["weights"]
    for found in ranks.run(2, variation, kind):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# The mean over two ranks improves in the first three steps only; rank 0's own metric does so always, rank 1's never.
METRICS = ([1.0, 0.8, 0.6, 0.5, 0.4], [1.0, 1.0, 1.0, 1.3, 1.5])


class Around:
    """A schedule by a metric that is not of torch's class, in the form of timm's."""

    def __init__(self, optimizer: Any, **settings: Any) -> None:
        self.inner = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **settings)
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict

    def step(self, epoch: int, metric: float | None = None) -> None:
        if metric is not None:
            self.inner.step(metric)


def rates_on_a_plateau(metrics: list[Any], kind: str, accelerator: Accelerator | None = None) -> list[float]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make: Any = {"torch": torch.optim.lr_scheduler.ReduceLROnPlateau, "timm": Around}[kind]
    scheduler = make(optimizer, factor=0.5, patience=0)
    if accelerator is not None:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for number, metric in enumerate(metrics):
        optimizer.step()
        if kind == "timm":
            scheduler.step(number)
            scheduler.step(number, metric=metric)
        else:
            scheduler.step(metrics=metric) if number % 2 else scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def rates_of_own_metrics(config: dict, kind: str) -> list[float]:
    accelerator = Accelerator(config=config)
    own = [torch.tensor(value) for value in METRICS[accelerator.process_index]]
    rates = rates_on_a_plateau(own, kind, accelerator)
    accelerator.free_memory()
    return rates


@pytest.mark.parametrize("config", [FULL, {"distributed_type": "MULTI_CPU"}], ids=["full", "ddp"])
@pytest.mark.parametrize("kind", ["torch", "timm"])
def test_a_plateau_of_own_metrics_is_that_of_their_mean(ranks, config, kind):
    expected = rates_on_a_plateau([sum(pair) / 2 for pair in zip(*METRICS, strict=True)], kind)
    assert expected == [1.0, 1.0, 1.0, 0.5, 0.25]
    assert ranks.run(2, rates_of_own_metrics, config, kind) == [expected] * 2
