"""States that a script loads into a prepared optimizer by hand, and optimizers that need whole parameters."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import Accelerator
from shardkit.errors import CheckpointError, ModelError, UsageError

FULL = {"use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
KINDS: dict[str, Any] = {
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "in loops": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.9, foreach=False),
}


def model() -> nn.Module:
    """Ranks have parts of different sizes, of one parameter none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def train(one: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Each rank has the same inputs, so that gradients are those of one process."""
    losses = []
    for step in steps:
        loss = one(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_one_process(kind: str) -> tuple[nn.Module, Any]:
    one = model()
    optimizer = KINDS[kind](one.parameters())
    train(one, optimizer, range(3))
    return one, optimizer


def prepared(kind: str, values: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(config=FULL)
    one = model()
    one.load_state_dict(values)
    one, optimizer = accelerator.prepare(one, KINDS[kind](one.parameters()))
    return accelerator, one, optimizer


def with_state_of_one_process(kind: str, is_warm: bool, folder: Path | None) -> tuple[list[float], bool]:
    """(losses after the state of one process was loaded by hand, whether the state is sharded then)."""
    before, optimizer = in_one_process(kind)
    state = copy.deepcopy(optimizer.state_dict())
    accelerator, one, optimizer = prepared(kind, before.state_dict())
    if is_warm:
        train(one, optimizer, range(7, 9))
        with torch.no_grad():
            for parameter, value in zip(one.parameters(), before.parameters(), strict=True):
                parameter.data = value
    optimizer.load_state_dict(state)
    if folder is not None:
        accelerator.save_state(folder)
        accelerator.free_memory()
        accelerator, one, optimizer = prepared(kind, model().state_dict())
        accelerator.load_state(folder)
    losses = train(one, optimizer, range(3, 6))
    states = [value for row in optimizer.state.values() for name, value in row.items() if name != "step"]
    accelerator.free_memory()
    return losses, all(isinstance(value, DTensor) for value in states)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["first", "warm", "saved"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_state_of_one_process_may_be_loaded_by_hand(ranks, tmp_path, kind, how):
    one, optimizer = in_one_process(kind)
    expected = train(one, optimizer, range(3, 6))
    folder = tmp_path / "state" if how == "saved" else None
    for losses, is_sharded in ranks.run(2, with_state_of_one_process, kind, how == "warm", folder):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert is_sharded


def settings_in_state_dict(kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Those of a prepared optimizer, and the kernels that it steps with after it has loaded them again."""
    accelerator, one, optimizer = prepared(kind, model().state_dict())
    train(one, optimizer, range(1))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    group = optimizer.param_groups[0]
    accelerator.free_memory()
    return state["param_groups"], {key: group[key] for key in ("fused", "foreach") if group.get(key) is not None}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_settings_in_a_state_dict_are_those_of_the_script(ranks, kind):
    """lerobot compares the types of saved settings with those of a new optimizer."""
    expected = in_one_process(kind)[1].state_dict()["param_groups"]
    kernels = {"fused": {"fused": True}, "foreach": {"foreach": True}, "in loops": {"foreach": False}}[kind]
    assert ranks.run(2, settings_in_state_dict, kind) == [(expected, kernels)] * 2


def with_state_of_another_model() -> str:
    accelerator, one, optimizer = prepared("fused", model().state_dict())
    train(one, optimizer, range(1))
    optimizer.state[next(one.parameters())]["exp_avg"] = torch.zeros(7, 3)
    with pytest.raises(UsageError) as refused:
        train(one, optimizer, range(1))
    accelerator.free_memory()
    return str(refused.value)


OF_ANOTHER_SHAPE = (
    "optimizer step: 'exp_avg' of a parameter of shape (5, 3) has another shape (got (7, 3)); load the state of an "
    "optimizer with the same parameters in the same order."
)


def test_a_state_of_another_shape_is_refused_before_a_kernel_reads_beside_it(ranks):
    assert ranks.run(2, with_state_of_another_model) == [OF_ANOTHER_SHAPE] * 2


def of_replicas(kind: str, is_prepared: bool) -> str:
    from torch.distributed import optim  # on ranks only, since its import warns

    accelerator = Accelerator(config=FULL)
    one = accelerator.prepare(model())
    if kind == "ZeroRedundancyOptimizer":
        optimizer: Any = optim.ZeroRedundancyOptimizer(one.parameters(), torch.optim.SGD, lr=0.1)
    else:
        optimizer = optim.PostLocalSGDOptimizer(torch.optim.SGD(one.parameters(), lr=0.1), None)
    one(inputs(0)).sum().backward()
    with pytest.raises(UsageError) as refused:
        accelerator.prepare(optimizer) if is_prepared else optimizer.step()
    accelerator.free_memory()
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "is_prepared"),
    [("ZeroRedundancyOptimizer", True), ("ZeroRedundancyOptimizer", False), ("PostLocalSGDOptimizer", True)],
)
def test_an_optimizer_that_exchanges_whole_parameters_is_refused(ranks, kind, is_prepared):
    text = (
        f"prepare: {kind} exchanges parameters between ranks as if each held all of them whole (got sharded "
        "parameters); give its inner optimizer, whose state is sharded as the parameters are, or use strategy NO_SHARD."
    )
    assert ranks.run(2, of_replicas, kind, is_prepared) == [text] * 2


def saved_with_zero(folder: str) -> str:
    from torch.distributed import optim  # on ranks only, since its import warns

    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    one = accelerator.prepare(model())
    optimizer = accelerator.prepare(optim.ZeroRedundancyOptimizer(one.parameters(), torch.optim.SGD, lr=0.1))
    train(one, optimizer, range(1))
    with pytest.raises(CheckpointError) as refused:
        accelerator.save_state(folder)
    accelerator.free_memory()
    return str(refused.value)


def test_a_save_of_an_optimizer_whose_state_is_spread_names_another(ranks, tmp_path):
    for text in ranks.run(2, saved_with_zero, str(tmp_path / "saved")):
        assert (
            "optim: the state of a ZeroRedundancyOptimizer cannot be saved or loaded; give prepare its inner "
            "optimizer, with strategy SHARD_GRAD_OP"
        ) in text


def in_backward(is_before: bool) -> str:
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    accelerator = Accelerator(config=FULL)
    one = model()
    calls = [lambda: _apply_optimizer_in_backward(torch.optim.SGD, one.parameters(), {"lr": 0.1})]
    calls.insert(1 if is_before else 0, lambda: accelerator.prepare(one))
    calls[0]()
    with pytest.raises((ModelError, UsageError)) as refused:
        calls[1]()
    accelerator.free_memory()
    return str(refused.value)


@pytest.mark.parametrize("is_before", [True, False])
def test_an_optimizer_in_backward_that_would_never_run_is_refused(ranks, is_before):
    for text in ranks.run(2, in_backward, is_before):
        assert (
            "an optimizer in backward, which would never run (got torch's _apply_optimizer_in_backward): FSDP itself "
            "sets the gradients of sharded parameters; step in a hook of register_post_accumulate_grad_hook, or use "
            "strategy NO_SHARD."
        ) in text


def compiled_steps() -> list[bool]:
    """Whether steps in a compiled function give the weights of plain ones, and whether later ones compile nothing.
    DDP has fused kernels, too."""
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    expected, _ = in_one_process("fused")
    one = model()
    one, optimizer = accelerator.prepare(one, KINDS["fused"](one.parameters()))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0))

    def step(loss: torch.Tensor) -> None:
        with accelerator.accumulate(one):
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(one.parameters(), 1e9)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(accelerator.reduce(loss.detach()))

    compiled, frames, equal = torch.compile(step, backend="eager"), [], []
    for number in range(9):
        compiled(one(inputs(number)).square().mean())
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
        equal.append(number != 2 or all(map(torch.allclose, one.parameters(), expected.parameters())))
    accelerator.free_memory()
    return [all(equal), frames[2] == frames[-1]]


@pytest.mark.slow
def test_a_compiled_step_is_a_plain_one(ranks):
    assert ranks.run(2, compiled_steps) == [[True, True]] * 2


def with_whole_gradients(kind: str) -> list[float]:
    """As in scripts that reduce gradients by hand: `accelerator.reduce` returns whole tensors."""
    accelerator, one, optimizer = prepared(kind, model().state_dict())
    losses = []
    for step in range(4):
        loss = one(inputs(step)).square().mean()
        accelerator.backward(loss)
        for parameter in one.parameters():
            parameter.grad = accelerator.reduce(parameter.grad, "mean")
        accelerator.clip_grad_norm_(one.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_whole_gradients_that_are_equal_on_all_ranks_are_taken(ranks, kind):
    one = model()
    optimizer = KINDS[kind](one.parameters())
    expected = []
    for step in range(4):
        loss = one(inputs(step)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for found in ranks.run(2, with_whole_gradients, kind):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_states_that_a_load_has_replaced_are_freed(alone, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(config=FULL)
    one = nn.Linear(7, 13, bias=False)
    one, optimizer = accelerator.prepare(one, torch.optim.Adam(one.parameters()))
    living = []
    for _ in range(4):
        one(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        gc.collect()
        living.append(sum(type(value) is DTensor and value.shape == (13, 7) for value in gc.get_objects()))
    assert living[1] == living[3]
