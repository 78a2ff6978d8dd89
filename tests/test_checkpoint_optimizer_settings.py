"""What a loaded optimizer makes of its settings and hooks, as torch's load_state_dict does."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shardkit.checkpoint.states import state
from shardkit.errors import CheckpointError
from tests import checkpoints


def stepped(make, steps=2):
    """A Live of one small model with an optimizer of it that has made some steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    live = state.Live([model], [make(model)])
    for _ in range(steps):
        step(live)
    return live


def step(live):
    live.models[0](torch.ones(4, 3)).square().mean().backward()
    live.optimizers[0].step()
    live.optimizers[0].zero_grad()


def test_a_subclass_keeps_what_is_its_own_when_it_loads_a_state_of_its_base(tmp_path):
    settings = {"lr": 0.1, "weight_decay": 0.5, "foreach": False}
    adam = stepped(lambda model: torch.optim.Adam(model.parameters(), **settings))
    checkpoints.save(adam, tmp_path / "saved")
    resumed = stepped(lambda model: torch.optim.AdamW(model.parameters(), **settings), steps=0)
    checkpoints.load(resumed, tmp_path / "saved")
    plain = stepped(lambda model: torch.optim.AdamW(model.parameters(), **settings), steps=0)
    plain.models[0].load_state_dict(adam.models[0].state_dict())
    plain.optimizers[0].load_state_dict(adam.optimizers[0].state_dict())
    for live in (resumed, plain):
        step(live)
    assert all(group["decoupled_weight_decay"] for group in resumed.optimizers[0].param_groups)
    assert torch.equal(resumed.models[0].weight, plain.models[0].weight)


def groups_with(rates):
    """Makes an optimizer with two groups that have these learning rates."""
    return lambda model: torch.optim.SGD(
        [{"params": [one], "lr": rate} for one, rate in zip(model.parameters(), rates(), strict=True)], foreach=False
    )


def one_rate():
    return [torch.tensor(0.5)] * 2


def test_groups_that_share_a_learning_rate_go_on_sharing_it(tmp_path):
    checkpoints.save(stepped(groups_with(one_rate)), tmp_path / "saved")
    live = stepped(groups_with(one_rate), steps=0)
    checkpoints.load(live, tmp_path / "saved")
    first, second = live.optimizers[0].param_groups
    first["lr"].fill_(0.25)
    assert second["lr"] is first["lr"]


def test_groups_that_share_a_learning_rate_do_not_mix_saved_ones(tmp_path):
    saved = stepped(groups_with(lambda: [torch.tensor(0.5), torch.tensor(0.25)]))
    checkpoints.save(saved, tmp_path / "saved")
    live = stepped(groups_with(one_rate), steps=0)
    checkpoints.load(live, tmp_path / "saved")
    assert [group["lr"].item() for group in live.optimizers[0].param_groups] == [0.5, 0.25]


SCHEDULES = {
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
    "restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 3),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, rates_of(one), [2 * rate for rate in rates_of(one)], 3),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0, min_lr=[r / 3 for r in rates_of(one)]),
    "chain": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one), lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step))], [1]
    ),
}


def rates_of(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def scheduled(kind, order, rates):
    """A Live of a model and an optimizer with a schedule; its groups, one for each parameter, stand in this order."""
    groups = [{"params": "weight", "lr": rates[0]}, {"params": "bias", "lr": rates[1]}]
    live = stepped(
        lambda m: torch.optim.SGD([{**groups[n], "params": [getattr(m, groups[n]["params"])]} for n in order]), 0
    )
    live.objects["scheduler.0"] = SCHEDULES[kind](live.optimizers[0])
    return live


def rates_after(live, steps):
    """The rate of each group after each step, by the size of its parameter."""
    found = []
    for _ in range(steps):
        step(live)
        schedule = live.objects["scheduler.0"]
        schedule.step(*[1.0] * isinstance(schedule, lr_scheduler.ReduceLROnPlateau))
        found.append({group["params"][0].dim(): group["lr"] for group in live.optimizers[0].param_groups})
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_what_a_schedule_keeps_for_each_group_follows_the_group(tmp_path, kind):
    """Its settings are found by its parameters, so the base rate of a schedule must not be that of another group."""
    saved = scheduled(kind, (0, 1), (0.5, 0.1))
    rates_after(saved, 2)
    checkpoints.save(saved, tmp_path / "saved")
    live = scheduled(kind, (1, 0), (0.5, 0.1))
    checkpoints.load(live, tmp_path / "saved")
    assert rates_after(live, 3) == rates_after(saved, 3)


def test_a_group_that_was_added_in_training_is_added_before_the_load(tmp_path):
    saved = scheduled("lambda", (1,), (0.5, 0.1))
    weight = {"params": [saved.models[0].weight], "lr": 0.5}
    saved.optimizers[0].add_param_group(weight)
    checkpoints.save(saved, tmp_path / "saved")
    live = scheduled("lambda", (1,), (0.5, 0.1))
    text = "optim: in the checkpoint, not in the optimizer: weight; call add_param_group before the load, if the saved"
    with pytest.raises(CheckpointError, match=text):
        checkpoints.load(live, tmp_path / "saved")
    live.optimizers[0].add_param_group({**weight, "params": [live.models[0].weight], "lr": 0.3})
    checkpoints.load(live, tmp_path / "saved")
    assert rates_of(live.optimizers[0]) == [0.1, 0.5]


def test_a_group_that_was_not_saved_begins_with_its_own_rate(tmp_path):
    saved = scheduled("lambda", (1,), (0.5, 0.1))
    rates_after(saved, 2)
    checkpoints.save(saved, tmp_path / "saved")
    live = scheduled("lambda", (0, 1), (0.5, 0.1))
    checkpoints.load(live, tmp_path / "saved", strict=False)
    assert rates_after(live, 1) == [{2: pytest.approx(0.5 / 4), 1: pytest.approx(0.1 / 4)}]


def test_hooks_of_an_optimizers_state_are_called(tmp_path):
    def with_hooks(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.seen = 0
        optimizer.register_state_dict_post_hook(lambda one, found: {**found, "seen": one.seen})
        optimizer.register_load_state_dict_pre_hook(lambda one, found: setattr(one, "seen", found["seen"]))
        return optimizer

    live = stepped(with_hooks)
    live.optimizers[0].seen = 5
    checkpoints.save(live, tmp_path / "saved")
    other = stepped(with_hooks, steps=0)
    checkpoints.load(other, tmp_path / "saved")
    assert other.optimizers[0].seen == 5


def test_a_state_that_may_be_another_classs_is_told_where_it_is_loaded(tmp_path, caplog, monkeypatch):
    """Of a checkpoint without the names of classes."""
    monkeypatch.setattr(checkpoints.state.Live, "classes", lambda live: {})
    adam = stepped(lambda model: torch.optim.Adam(model.parameters()))
    adam.objects["scheduler.0"] = torch.optim.lr_scheduler.StepLR(adam.optimizers[0], 2)
    checkpoints.save(adam, tmp_path / "saved")
    checkpoints.load(adam, tmp_path / "saved")
    assert "saved state has" not in caplog.text
    monkeypatch.undo()
    other = stepped(lambda model: torch.optim.Adamax(model.parameters()), steps=0)
    other.objects["scheduler.0"] = torch.optim.lr_scheduler.ExponentialLR(other.optimizers[0], 0.9)
    checkpoints.load(other, tmp_path / "saved")
    assert "optim: the saved state has amsgrad, decoupled_weight_decay, which Adamax has not" in caplog.text
    assert "scheduler.0: the saved state has step_size, which ExponentialLR has not" in caplog.text
