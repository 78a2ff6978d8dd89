"""What optimizers keep beside a row a parameter. Resumed runs are compared with uninterrupted ones."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardkit import Accelerator
from shardkit.checkpoint.commands import convert
from shardkit.checkpoint.files import manifest
from shardkit.checkpoint.states import optimizers, state
from shardkit.distributed.tensors import local_part
from shardkit.errors import CheckpointError, StateIncomplete
from shardkit.model.prepared import Prepared
from tests import checkpoints


def model_of(strategy, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if strategy == "ddp" else model


def steps_of(model, optimizer, steps, first=0):
    """The weights after some steps; all ranks have the same data, so that ranks and strategies give equal results."""
    for step in range(first, first + steps):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: checkpoints.full(p).detach().clone() for name, p in state.model_tensors(model).items()}


class Global(torch.optim.Optimizer):
    """Keeps state of no parameter under text, as some schedulers of step sizes do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        self.state["rate"] = self.state.get("rate", 1.0) * 0.5
        self.state["history"] = {"seen": [*self.state.get("history", {}).get("seen", []), torch.tensor([1.0])]}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.state["rate"])


class Lookahead(torch.optim.Optimizer):
    """A wrapped optimizer and slow weights by the parameters' numbers, all in its own state_dict."""

    def __init__(self, parameters, every=2):
        self.base = torch.optim.AdamW(parameters, lr=0.05)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups = self.base.param_groups
        self.every, self.steps, self.slow = every, 0, {}

    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        if not self.slow:
            self.slow = {number: p.detach().clone() for number, p in enumerate(parameters)}
        self.base.step()
        self.steps += 1
        if self.steps % self.every == 0:
            for number, parameter in enumerate(parameters):
                self.slow[number].lerp_(parameter, 0.5)
                parameter.copy_(self.slow[number])

    def state_dict(self):
        rows, groups = {n: {"slow": t} for n, t in self.slow.items()}, super().state_dict()["param_groups"]
        slow = {"state": rows, "param_groups": groups}
        return {**self.base.state_dict(), "steps": self.steps, "slow": slow}

    def load_state_dict(self, saved):
        self.base.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
        self.param_groups, self.steps = self.base.param_groups, saved["steps"]
        self.slow = {number: row["slow"] for number, row in saved["slow"]["state"].items()}


class Wrapping(torch.optim.Optimizer):
    """A dict of a form of its own."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups, self.count = self.inner.param_groups, 0

    def step(self):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        self.inner.step()

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "count": self.count, "tags": ("a", None)}

    def load_state_dict(self, saved):
        assert saved["tags"] == ("a", None)
        self.inner.load_state_dict(saved["inner"])
        self.param_groups, self.count = self.inner.param_groups, saved["count"]


class Stepping(torch.optim.Optimizer):
    """Steps another one, as published optimizers for sharpness-aware steps do: its state_dict() lacks that one's."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.AdamW(self.param_groups, lr=0.05)
        self.param_groups = self.inner.param_groups

    def step(self):
        self.inner.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("old", torch.zeros_like(parameter)).copy_(parameter.detach())


class Relinking(Stepping):
    def load_state_dict(self, saved):
        super().load_state_dict(saved)
        self.inner.param_groups = self.param_groups


class Flagged(torch.optim.AdamW):
    """Only its loading is its own: it counts how often, and keeps what the saved groups say."""

    loads = 0

    def load_state_dict(self, saved):
        self.loads += 1
        super().load_state_dict(saved)
        assert all(group["train_mode"] is False for group in self.param_groups)


def flagged(parameters):
    optimizer = Flagged(parameters, lr=0.05)
    for group in optimizer.param_groups:
        group["train_mode"] = False
    return optimizer


KINDS = {"global": Global, "lookahead": Lookahead, "wrapping": Wrapping, "flagged": flagged}
KINDS |= {"stepping": Stepping, "relinking": Relinking}


def uninterrupted(kind, strategy, steps):
    model = model_of(strategy)
    return steps_of(model, KINDS[kind](model.parameters()), steps)


def save_after(kind, strategy, steps, folder, how="sharded"):
    model = model_of(strategy)
    optimizer = KINDS[kind](model.parameters())
    steps_of(model, optimizer, steps)
    checkpoints.save(state.Live([model], [optimizer]), folder, steps, how)


def go_on(kind, strategy, steps, first, folder, has_stepped):
    model = model_of(strategy, seed=9)
    optimizer = KINDS[kind](model.parameters())
    if has_stepped:
        steps_of(model, optimizer, 1)
    checkpoints.load(state.Live([model], [optimizer]), folder)
    if kind == "flagged":
        assert optimizer.loads == 1
    return steps_of(model, optimizer, steps, first)


def assert_close(found, expected):
    for weights in found:
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("has_stepped", [pytest.param(False, id="fresh"), pytest.param(True, id="after a step")])
@pytest.mark.parametrize(("before", "after"), [((2, "fsdp"), (2, "fsdp")), ((1, "plain"), (2, "fsdp"))], ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_run_goes_on_as_one_that_never_stopped(ranks, tmp_path, kind, before, after, has_stepped):
    expected = uninterrupted(kind, "plain", 5)
    ranks.run(before[0], save_after, kind, before[1], 3, tmp_path / "c")
    found = ranks.run(after[0], go_on, kind, after[1], 2, 3, tmp_path / "c", has_stepped)
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "full"])
@pytest.mark.parametrize("after", [(1, "plain"), (2, "ddp"), (3, "fsdp")], ids=str)
@pytest.mark.parametrize("before", [(3, "fsdp"), (2, "ddp")], ids=str)
@pytest.mark.parametrize("kind", list(KINDS))
def test_on_any_ranks_and_strategies(ranks, tmp_path, kind, before, after, how):
    expected = uninterrupted(kind, "plain", 5)
    ranks.run(before[0], save_after, kind, before[1], 3, tmp_path / "c", how)
    assert_close(ranks.run(after[0], go_on, kind, after[1], 2, 3, tmp_path / "c", False), expected)


def test_a_checkpoint_with_more_in_it_is_refused_by_older_readers_and_others_look_as_before(tmp_path):
    for kind, version in (("global", 2), ("lookahead", 2), ("wrapping", 2), ("flagged", 1)):
        save_after(kind, "plain", 1, tmp_path / kind)
        text = (tmp_path / kind / manifest.NAME).read_text()
        assert f'"min_reader":{version},' in text and f'"version":{version},' in text


def slow_weights_in_another_order(folder):
    """The parameters stand in another order when it is loaded: names decide, not numbers."""
    model = model_of("plain")
    optimizer = Lookahead(model.parameters())
    steps_of(model, optimizer, 3)
    checkpoints.save(state.Live([model], [optimizer]), folder)
    loaded = model_of("plain", seed=4)
    other = Lookahead([*loaded.parameters()][::-1])
    checkpoints.load(state.Live([loaded], [other]), folder)
    assert [other.slow[number].shape for number in range(4)] == [p.shape for p in [*loaded.parameters()][::-1]]
    assert_close([steps_of(loaded, other, 2, 3)], steps_of(model, optimizer, 2, 3))


def test_parameters_may_stand_in_another_order(tmp_path):
    slow_weights_in_another_order(tmp_path / "c")


@pytest.mark.parametrize("kind", ["plain", "lookahead", "wrapping", "stepping", "relinking"])
def test_groups_may_stand_in_another_order(tmp_path, kind):
    """Those of an optimizer inside another one, too."""
    make = KINDS.get(kind, lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9))

    def built(seed, order):
        model = model_of("plain", seed)
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "lr": 0.01}]
        return model, make([groups[number] for number in order])

    model, optimizer = built(0, (0, 1))
    steps_of(model, optimizer, 3)
    checkpoints.save(state.Live([model], [optimizer]), tmp_path / "c")
    loaded, other = built(4, (1, 0))
    checkpoints.load(state.Live([loaded], [other]), tmp_path / "c")
    assert_close([steps_of(loaded, other, 2, 3)], steps_of(model, optimizer, 2, 3))


def slow_weights_stay_sharded(folder):
    save_after("lookahead", "fsdp", 3, folder)
    model = model_of("fsdp", seed=9)
    optimizer = Lookahead(model.parameters())
    checkpoints.load(state.Live([model], [optimizer]), folder)
    pairs = zip(optimizer.slow.values(), model.parameters(), strict=True)
    return [isinstance(slow, DTensor) and slow.placements == p.placements for slow, p in pairs]


def test_sharded_tensors_in_an_own_state_dict_are_sharded_again(ranks, tmp_path):
    assert ranks.run(2, slow_weights_stay_sharded, tmp_path / "c") == [[True] * 4] * 2


class Refusing(Lookahead):
    def load_state_dict(self, saved):
        raise KeyError("no such thing")


def test_what_refuses_its_state_leaves_an_incomplete_one_and_says_so(tmp_path):
    save_after("lookahead", "plain", 2, tmp_path / "c")
    model = model_of("plain", seed=9)
    live = state.Live([model], [Refusing(model.parameters())])
    with pytest.raises(StateIncomplete, match=r"(?s)only part of the state was loaded.*KeyError: 'no such thing'"):
        checkpoints.load(live, tmp_path / "c")


def test_a_key_that_is_no_text_is_refused_by_its_place(tmp_path):
    model = model_of("plain")
    optimizer = Global(model.parameters())
    optimizer.state[7] = 1
    with pytest.raises(CheckpointError, match=r"optim: state\[7\]: a key of type int cannot be saved; use strings"):
        checkpoints.save(state.Live([model], [optimizer]), tmp_path / "c")


def test_what_was_saved_before_own_dicts_were_asked_for_still_loads(tmp_path, caplog):
    """A checkpoint of AdamW, as earlier versions saved Lookahead: the wrapped one's state, and no more."""
    model = model_of("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    steps_of(model, optimizer, 2)
    checkpoints.save(state.Live([model], [optimizer]), tmp_path / "c")
    loaded = model_of("plain", seed=9)
    other = Lookahead(loaded.parameters())
    caplog.set_level("WARNING", "shardkit")
    checkpoints.load(state.Live([loaded], [other]), tmp_path / "c")
    assert "optim: the checkpoint has no steps, slow of this optimizer" in caplog.text
    assert_close([state.model_tensors(loaded)], state.model_tensors(model))


@pytest.mark.parametrize("kind", [Stepping, Relinking])
def test_what_was_saved_without_inner_optimizers_loads_and_says_so(tmp_path, caplog, monkeypatch, kind):
    model = model_of("plain")
    optimizer = kind(model.parameters())
    steps_of(model, optimizer, 2)
    with monkeypatch.context() as earlier:
        earlier.setattr(optimizers, "inner_of", lambda optimizer: {})
        checkpoints.save(state.Live([model], [optimizer]), tmp_path / "c")
    caplog.set_level("WARNING", "shardkit")
    checkpoints.load(state.Live([model], [optimizer]), tmp_path / "c")
    assert "optim: the checkpoint has no inner of this optimizer; it stays unchanged" in caplog.text
    assert optimizer.inner.param_groups is optimizer.param_groups and len(optimizer.inner.state) == 4


@pytest.mark.parametrize("kind", ["global", "lookahead"])
def test_what_accelerate_saved_of_such_an_optimizer_comes_over(tmp_path, kind):
    """As its `optimizer.bin`: the whole state_dict, parameters by number."""
    model = model_of("plain")
    optimizer = KINDS[kind](model.parameters())
    steps_of(model, optimizer, 3)
    (tmp_path / "old").mkdir()
    torch.save(model.state_dict(), tmp_path / "old/pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "old/optimizer.bin")
    alone = Prepared([{name: True for name, _ in model.named_parameters()}], [])
    done = convert.convert(tmp_path / "old", tmp_path / "new", 3, alone)
    found = model_of("plain", seed=9)
    other = KINDS[kind](found.parameters())
    checkpoints.load(state.Live([found], [other], {"counters": checkpoints.Counter()}), done.path)
    assert_close([steps_of(found, other, 2, 3)], steps_of(model, optimizer, 2, 3))


# ---- what ranks have differently ----


class Blockwise(torch.optim.SGD):
    """Momentum as 8 bits with a scale for each block of this rank's part: plain tensors, their shapes by the part."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                row, part = self.state[parameter], local_part(parameter)
                size = -(-part.numel() // 4)
                row.setdefault("codes", torch.zeros(part.numel(), dtype=torch.uint8))
                row.setdefault("scales", torch.zeros(size))
                row["count"] = row.get("count", 0) + 1
                blocks = local_part(parameter.grad).reshape(-1)
                padded = torch.zeros(4 * size)
                padded[: part.numel()] = blocks
                row["scales"].add_(padded.view(size, 4).abs().amax(1))
                row["codes"] += 1
                part.reshape(-1).sub_(0.1 * blocks * row["scales"].repeat_interleave(4)[: part.numel()])


def blockwise(strategy, steps, folder=None, how="sharded"):
    model = model_of(strategy)
    optimizer = Blockwise(model.parameters(), lr=0.1)
    weights = steps_of(model, optimizer, steps)
    if folder is not None:
        checkpoints.save(state.Live([model], [optimizer]), folder, steps, how)
    return weights


def blockwise_again(strategy, steps, first, folder, has_stepped):
    model = model_of(strategy, seed=9)
    optimizer = Blockwise(model.parameters(), lr=0.1)
    if has_stepped:
        steps_of(model, optimizer, 1)
    checkpoints.load(state.Live([model], [optimizer]), folder)
    return steps_of(model, optimizer, steps, first)


@pytest.mark.parametrize("has_stepped", [False, True], ids=["fresh", "after a step"])
@pytest.mark.parametrize("how", ["sharded", "full"])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_plain_tensors_of_a_sharded_parameter_come_back_to_their_rank(ranks, tmp_path, world, how, has_stepped):
    expected = ranks.run(world, blockwise, "fsdp", 5)
    ranks.run(world, blockwise, "fsdp", 3, tmp_path / "c", how)
    own = sorted((tmp_path / "c/own").iterdir())
    assert [path.name for path in own] == [f"r{rank:05d}-of-{world:05d}.safetensors" for rank in range(world)]
    found = ranks.run(world, blockwise_again, "fsdp", 2, 3, tmp_path / "c", has_stepped)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def refuse_elsewhere(strategy, folder, why):
    model = model_of(strategy, seed=9)
    before = {name: local_part(tensor).clone() for name, tensor in state.model_tensors(model).items()}
    live = state.Live([model], [Blockwise(model.parameters(), lr=0.1)])
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(live, folder)
    told = str(caught.value)
    assert why in told and "nothing was changed" in told
    assert re.search(r"optim: 0\.weight/codes.*each of the 2 ranks saved a different value", told)
    assert re.search(r"optim: 0\.weight/scales", told) and "load on 2 ranks with the same strategy" in told
    assert all(torch.equal(local_part(t), before[name]) for name, t in state.model_tensors(model).items())
    checkpoints.load(live, folder, strict=False)
    return not live.optimizers[0].state, {n: checkpoints.full(t) for n, t in state.model_tensors(model).items()}


ELSEWHERE = [(3, "fsdp", "ranks has"), (1, "plain", "ranks has"), (2, "plain", "the sharding of its")]


@pytest.mark.parametrize(("world", "strategy", "why"), ELSEWHERE)
def test_elsewhere_they_are_refused_by_parameter_and_key(ranks, tmp_path, world, strategy, why):
    expected = ranks.run(2, blockwise, "fsdp", 3, tmp_path / "c")[0]
    for started_anew, weights in ranks.run(world, refuse_elsewhere, strategy, tmp_path / "c", why):
        assert started_anew
        assert_close([weights], expected)


def test_what_is_equal_on_all_ranks_is_shared_as_before(ranks, tmp_path):
    """One rank holds all; the counts, equal everywhere, need no rank of their own."""
    ranks.run(2, save_after, "flagged", "fsdp", 1, tmp_path / "c")
    assert not (tmp_path / "c/own").exists()
    assert '"version":1,' in (tmp_path / "c" / manifest.NAME).read_text()
    ranks.run(2, blockwise, "fsdp", 1, tmp_path / "b")
    common = (tmp_path / "b/state/common.json").read_text()
    assert '"count":1' in common and "codes" not in common.replace('"*","codes"', "")


class Drifting(torch.optim.SGD):
    """Under DDP, each rank keeps a large tensor of its own: replicas of it must not be mixed."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            row = self.state[parameter]
            row.setdefault("own", torch.full((700, 500), float(dist.get_rank() + 1)))
            row["alike"] = torch.full((700, 500), 3.0)
            row["own"] += 1


def drifting(folder):
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = Drifting(model.parameters(), lr=0.1)
    optimizer.step()
    checkpoints.save(state.Live([model], [optimizer]), folder)
    other = Drifting(model.parameters(), lr=0.1)
    checkpoints.load(state.Live([model], [other]), folder)
    return [(row["own"].unique().tolist(), row["alike"].unique().tolist()) for row in other.state.values()]


def test_replicas_that_drifted_are_kept_apart_not_mixed(ranks, tmp_path):
    assert ranks.run(2, drifting, tmp_path / "c") == [[([2.0], [3.0])] * 2, [([3.0], [3.0])] * 2]
    sizes = [path.stat().st_size for path in (tmp_path / "c/optim").iterdir()]
    assert sum(sizes) < 1.1 * 2 * 700 * 500 * 4, "what is alike is written once"


def load_into_others(project):
    """What AdamW and StepLR left, for SGD and for a cosine."""
    told = []
    for make, schedule in (
        (lambda p: torch.optim.SGD(p, lr=0.1), lambda o: torch.optim.lr_scheduler.StepLR(o, 2)),
        (torch.optim.AdamW, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)),
        (torch.optim.AdamW, lambda o: torch.optim.lr_scheduler.StepLR(o, 3)),
    ):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator = Accelerator(config={"use_cpu": True})
        made = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
        accelerator.save_state(project / "saved")
        accelerator.free_memory()
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters())
        made = accelerator.prepare(model, optimizer, schedule(optimizer))
        try:
            accelerator.load_state(project / "saved")
        except CheckpointError as error:
            told.append(str(error))
        del made
    return told


@pytest.mark.slow
def test_a_state_of_another_kind_of_optimizer_or_schedule_is_refused(ranks, tmp_path):
    for told in ranks.run(2, load_into_others, tmp_path):
        assert len(told) == 2
        assert "optim: was saved from another class than SGD (it has amsgrad, betas" in told[0]
        assert "scheduler.0: was saved from another class than CosineAnnealingLR (it has gamma, step_size" in told[1]
