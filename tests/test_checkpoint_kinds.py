"""What a load notices of objects and settings that the script has changed since the save."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardkit.checkpoint.states.state import Live
from shardkit.errors import CheckpointError
from tests import checkpoints
from tests.ranks import log_lines


class Meter:
    """An object that takes any state."""

    def __init__(self, total=0.0):
        self.total = total

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class Average(Meter):
    """Another one."""


def live_of(*objects, schedule=None, optimizer=torch.optim.AdamW, **settings):
    model = nn.Linear(3, 2)
    made = optimizer(model.parameters(), **{"lr": 0.1, **settings})
    found = {} if schedule is None else {"scheduler.0": schedule(made)}
    return Live([model], [made], found | {f"registered.{number}": item for number, item in enumerate(objects)})


def test_registered_objects_in_another_order_are_refused(tmp_path):
    checkpoints.save(live_of(Meter(1.0), Average(2.0)), tmp_path / "c")
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(live_of(Average(), Meter()), tmp_path / "c")
    assert "registered.0: was saved from another object (got Average, saved Meter); register" in str(raised.value)
    assert "registered.1: was saved from another object (got Meter, saved Average)" in str(raised.value)


def test_an_object_registered_before_the_others_does_not_get_the_state_of_one(tmp_path):
    checkpoints.save(live_of(Meter(1.0)), tmp_path / "c")
    first, second = Average(7.0), Meter(8.0)
    checkpoints.load(live_of(first, second), tmp_path / "c", strict=False)
    assert (first.total, second.total) == (7.0, 8.0)


def test_an_object_whose_class_has_another_name_gets_its_state(tmp_path):
    checkpoints.save(live_of(Meter(1.0)), tmp_path / "c")
    renamed = Average()
    with log_lines() as lines:
        checkpoints.load(live_of(renamed), tmp_path / "c")
    assert renamed.total == 1.0
    assert any("registered.0: was saved from Meter; Average gets its state" in line for line in lines)


def objects_of_this_rank(project, order):
    """Rank 0 has one object more; what both have differs."""
    rank = torch.distributed.get_rank()
    mine = [Average(5.0 + rank), *([Meter(1.0)] if rank == 0 else [])]
    checkpoints.save(live_of(*mine[::-1]), project)
    found = [Average(), *([Meter()] if rank == 0 else [])]
    checkpoints.load(live_of(*found[::-order]), project)
    return [one.total for one in found]


@pytest.mark.slow
def test_each_rank_compares_with_its_own(ranks, tmp_path):
    assert ranks.run(2, objects_of_this_rank, tmp_path / "c", 1) == [[5.0, 1.0], [6.0]]


class Loader:
    """Of no data."""

    def state_dict(self):
        return {"samples_seen": 0}

    def load_state_dict(self, state):
        pass

    def misfit(self, state, saved_ranks):
        return None


def test_a_loader_that_the_saved_run_did_not_have_is_told(tmp_path):
    """One that was prepared first gets the position of another."""
    live, other = live_of(), live_of()
    live.loaders |= {"loader.0": Loader()}
    other.loaders |= {"loader.0": Loader(), "loader.1": Loader()}
    checkpoints.save(live, tmp_path / "c")
    with log_lines() as lines:
        checkpoints.load(other, tmp_path / "c")
    assert any("loader.1: the checkpoint has no position of it, so it begins at its start" in line for line in lines)


def test_a_model_of_other_shapes_is_told_what_to_do(tmp_path):
    live, other = live_of(), live_of()
    live.models[0] = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))
    other.models[0] = nn.Sequential(*(nn.Linear(3, 2) for _ in range(9)))
    live.optimizers = other.optimizers = []
    checkpoints.save(live, tmp_path / "c")
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(other, tmp_path / "c")
    assert "2.weight: shape [2, 2] in the checkpoint, [2, 3] in the model and 6 more; prepare" in str(raised.value)


def cosine(length):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, length)


def warmed(length):
    return lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, length)], [2]
    )


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            {"schedule": cosine(30)},
            {"schedule": cosine(60)},
            "scheduler.0: the saved settings are used (T_max 30, not 60)",
        ),
        (
            {"schedule": warmed(30)},
            {"schedule": warmed(60)},
            "scheduler.0: the saved settings are used (T_max 30, not 60)",
        ),
        ({}, {"lr": 0.2}, "optim.param_groups[0]: the saved settings are used (lr 0.1, not 0.2)"),
        ({"betas": (0.8, 0.9)}, {}, "the saved settings are used (betas (0.8, 0.9), not (0.9, 0.999))"),
        (
            {"schedule": cosine(30)},
            {"schedule": cosine(30), "lr": 0.2},
            "optim.param_groups[0]: the saved settings are used (initial_lr 0.1, not 0.2); for another rate, "
            "multiply the groups' lr and the schedule's base_lrs by a factor after the load",
        ),
        ({}, {"optimizer": torch.optim.Adam}, "optim: was saved from AdamW; Adam goes on with its state and settings"),
    ],
)
def test_settings_that_a_load_replaces_are_told(tmp_path, before, after, told):
    checkpoints.save(live_of(**before), tmp_path / "c")
    with log_lines() as lines:
        checkpoints.load(live_of(**after), tmp_path / "c")
    assert any(told in line for line in lines)


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)


SCHEDULES = [None, cosine(30), warmed(30), lambda o: lr_scheduler.OneCycleLR(o, 0.1, 30), plateau]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_only_the_steps_have_changed_is_not_told(tmp_path, schedule):
    live = live_of(schedule=schedule)
    for _ in range(3):
        live.models[0](torch.ones(3)).sum().backward()
        live.optimizers[0].step()
        for item in live.objects.values():
            item.step(*([1.0] if schedule is plateau else []))
    checkpoints.save(live, tmp_path / "c")
    with log_lines() as lines:
        checkpoints.load(live_of(schedule=schedule), tmp_path / "c")
    assert not lines


def test_a_rounding_error_of_a_setting_is_not_told(tmp_path):
    checkpoints.save(live_of(lr=0.1 + 0.2), tmp_path / "c")
    with log_lines() as lines:
        checkpoints.load(live_of(lr=0.3), tmp_path / "c")
    assert not lines


def test_a_schedule_that_lacks_settings_of_another_is_refused(tmp_path):
    checkpoints.save(live_of(schedule=lambda o: lr_scheduler.ExponentialLR(o, 0.9)), tmp_path / "c")
    with pytest.raises(CheckpointError, match="another class than StepLR \\(it lacks step_size\\)"):
        checkpoints.load(live_of(schedule=lambda o: lr_scheduler.StepLR(o, 3)), tmp_path / "c")
