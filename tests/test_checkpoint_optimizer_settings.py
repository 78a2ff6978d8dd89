"""What a loaded optimizer makes of its settings and hooks, as torch's load_state_dict does."""

import torch
from torch import nn

from shardkit.checkpoint import state
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
