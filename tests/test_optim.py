"""Optimizers that were built before, their path over sharded parameters, and the norm of all gradients."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.distributed.tensors import local_part
from shardkit.errors import ModelError, UsageError
from shardkit.optim import clip, division, kernels, plain_step, rebind, stepping
from shardkit.sharding.init import init_empty_weights
from tests import models
from tests.engine import parallel
from tests.models import Reductions


def config_for(world: int, strategy: int = 1, **fsdp: Any) -> Config:
    machines = 2 if world == 4 else 1
    settings = {"fsdp_sharding_strategy": strategy, **fsdp}
    return Config(num_processes=world, num_machines=machines, use_cpu=True, fsdp_config=settings)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 19, (4, 9), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: range, step: Any = None) -> list[float]:
    """Losses over all ranks; each takes its part of the same batches."""
    losses = []
    for number in steps:
        world = dist.get_world_size() if isinstance(next(model.parameters()), DTensor) else 1
        mine = tokens(number).chunk(world)[dist.get_rank() if world > 1 else 0]
        loss = models.next_token_loss(model, mine)
        loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    wide = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": wide, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def rebound(warm: bool, tied: bool, strategy: int, fast: bool) -> tuple[list[float], list[float], list[str]]:
    """(losses, losses in one process, what is wrong) of an optimizer with two groups, built before sharding."""
    torch.manual_seed(0)
    model = models.Gpt(tied=tied)
    # The large epsilon: see test_equivalence.
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    if warm:
        train(model, optimizer, range(2))
        schedule.step()
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(two_groups(twin), lr=1e-2, eps=1e-4)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    names = rebind.ParameterNames.of(model)
    sharded = parallel(model, config_for(dist.get_world_size(), strategy))
    rebind.rebind(optimizer, names, sharded)
    stepper = stepping.stepper_of(optimizer) if fast else plain_step.PlainStep(optimizer)
    found = train(sharded, optimizer, range(2, 6), stepper.step)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    problems = [fqn for fqn, p in sharded.named_parameters() if id(p) not in held]
    problems += [f"state of {k}" for p, s in optimizer.state.items() for k, v in s.items() if not fits(p, k, v)]
    problems += ["groups"] * (schedule.optimizer.param_groups is not optimizer.param_groups)
    return found, train(twin, twin_optimizer, range(2, 6)), problems


def fits(parameter: torch.Tensor, key: str, value: torch.Tensor) -> bool:
    return key == "step" or (isinstance(value, DTensor) and value.placements == parameter.placements)


@pytest.mark.slow
@pytest.mark.requirement("D3")
@pytest.mark.parametrize(
    ("warm", "tied", "strategy", "world"),
    [(False, False, 1, 2), (True, True, 1, 2), (True, False, 4, 4), (False, True, 2, 2)],
)
def test_an_optimizer_built_before_goes_on(ranks, warm, tied, strategy, world):
    for found, expected, problems in ranks.run(world, rebound, warm, tied, strategy, True):
        assert found == pytest.approx(expected, abs=1e-5)
        assert problems == []


class RowMeans(torch.optim.SGD):
    """A custom optimizer whose state has a different shape than its parameters."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["row_var"] = torch.zeros(3)


def shaped_otherwise() -> str:
    model = models.Gpt()
    optimizer = RowMeans(model.parameters())
    train(model, optimizer, range(1))
    names = rebind.ParameterNames.of(model)
    sharded = parallel(model, config_for(2))
    try:
        rebind.rebind(optimizer, names, sharded)
    except ModelError as error:
        return str(error)
    return "accepted"


def state_without_values(strategy: int) -> str:
    with init_empty_weights():
        model = models.Gpt()
    optimizer = torch.optim.Adagrad(model.parameters())
    names = rebind.ParameterNames.of(model)
    sharded = parallel(model, config_for(2, strategy))
    with pytest.raises(ModelError) as error:
        rebind.rebind(optimizer, names, sharded)
    return str(error.value)


@pytest.mark.parametrize("strategy", [1, 3])
def test_state_of_a_model_without_values_is_refused(ranks, strategy):
    assert ranks.run(2, state_without_values, strategy)[0] == (
        "optimizer: Adagrad keeps 'sum' of embed.weight since it was built, when the model had no values (got a tensor "
        "on the meta device); build the optimizer after prepare."
    )


def test_state_of_another_shape_is_refused(ranks):
    text = ranks.run(2, shaped_otherwise)[0]
    assert text.startswith(
        "optimizer: RowMeans keeps 'row_var' of embed.weight in a shape that differs from the parameter's"
    )
    assert "build the optimizer after prepare" in text


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-3),
}


def fast_and_slow(name: str) -> tuple[list[float], list[float], list[str]]:
    """(losses on the fast path, losses one by one, operators of a fast step)."""
    losses, operators = [], []
    for fast in (True, False):
        torch.manual_seed(0)
        model = models.Gpt()
        optimizer = OPTIMIZERS[name](model.parameters())
        names = rebind.ParameterNames.of(model)
        sharded = parallel(model, config_for(2))
        rebind.rebind(optimizer, names, sharded)
        stepper = stepping.stepper_of(optimizer) if fast else plain_step.PlainStep(optimizer)
        losses.append(train(sharded, optimizer, range(3), stepper.step))
        if fast:
            models.next_token_loss(sharded, tokens(0)).backward()
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                stepper.step()
            operators = sorted({event.name for event in trace.events() if "_f" in event.name})
    return losses[0], losses[1], operators


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "AdamW" else [pytest.mark.slow]) for name in OPTIMIZERS]
)
def test_the_fast_path_is_taken_with_equal_results(ranks, name):
    fused = {"AdamW": "aten::_fused_adamw_", "Adam": "aten::_fused_adam_"}
    for fast, slow, operators in ranks.run(2, fast_and_slow, name):
        assert fast == pytest.approx(slow, abs=1e-5)
        assert fused.get(name, "aten::_foreach_") in " ".join(operators)


HOOKED = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def hooked(name: str, is_sharded: bool) -> tuple[list[float], int]:
    """(losses, hooks called) where hooks on the step clip gradients and weights by their norms, those of each tensor
    whole."""
    torch.manual_seed(0)
    model: nn.Module = models.Gpt()
    optimizer = HOOKED[name](model.parameters())
    called = []

    def clip_gradients(of: torch.optim.Optimizer, *_: Any) -> None:
        called.append(nn.utils.clip_grad_norm_(of.param_groups[0]["params"], 0.1))

    def shrink_weights(of: torch.optim.Optimizer, *_: Any) -> None:
        called.append(of.state_dict())
        with torch.no_grad():
            for parameter in of.param_groups[0]["params"]:
                parameter.mul_(min(1.0, 1.0 / float(parameter.norm())))

    optimizer.register_step_pre_hook(clip_gradients)
    optimizer.register_step_post_hook(shrink_weights)
    if not is_sharded:
        return train(model, optimizer, range(3)), len(called)
    names = rebind.ParameterNames.of(model)
    sharded = parallel(model, config_for(2))
    rebind.rebind(optimizer, names, sharded)
    found, division.WHOLE_BYTES = division.WHOLE_BYTES, 3000  # several chunks
    try:
        return train(sharded, optimizer, range(3), stepping.stepper_of(optimizer).step), len(called)
    finally:
        division.WHOLE_BYTES = found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "AdamW" else [pytest.mark.slow]) for name in HOOKED]
)
def test_hooks_on_the_step_see_the_models_parameters(ranks, name):
    expected = hooked(name, is_sharded=False)
    assert expected[1] == 6
    for losses, called in ranks.run(2, hooked, name, True):
        assert losses == pytest.approx(expected[0], abs=1e-5)
        assert called == 6


def of_whole_tensors(name: str, project: Path | None = None, resume: bool = False) -> tuple[list[float], float]:
    """(weights after four steps, the third and fourth maybe resumed; the part of the state that this rank keeps).
    `name`: Muon, or Transformers' Adafactor with a first moment. In one process where there is no group."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 3, bias=False))
    if name == "Muon":
        optimizer: Any = torch.optim.Muon(model.parameters(), lr=1e-2)
    else:
        adafactor = pytest.importorskip("transformers.optimization").Adafactor
        optimizer = adafactor(model.parameters(), lr=1e-2, relative_step=False, beta1=0.9)
    accelerator = None
    if dist.is_initialized():
        settings = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
        accelerator = Accelerator(config={**settings, "num_processes": dist.get_world_size()})
        model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(project)
    for step in range(2 if resume else 0, 4):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        accelerator.backward(loss) if accelerator else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and project:
            accelerator.save_state(project)
    state = [(p, v) for p, row in optimizer.state.items() for v in row.values() if getattr(v, "shape", 0) == p.shape]
    assert len(state) == 2 and all(isinstance(v, DTensor) is isinstance(p, DTensor) for p, v in state)
    kept = sum(local_part(v).numel() for _, v in state) / sum(v.numel() for _, v in state)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [value for p in weights for value in p.detach().flatten().tolist()], kept


@pytest.mark.parametrize("name", ["Muon", pytest.param("Adafactor", marks=pytest.mark.slow)])
def test_state_of_whole_tensors_is_sharded_between_steps(ranks, tmp_path, name):
    expected, _ = of_whole_tensors(name)
    tolerance = 2e-3 if name == "Muon" else 1e-5  # Muon computes in bf16
    saved = ranks.run(2, of_whole_tensors, name, tmp_path / "state")
    resumed = ranks.run(3, of_whole_tensors, name, tmp_path / "state", True)
    for weights, kept in [*saved, *resumed]:
        assert weights == pytest.approx(expected, abs=tolerance)
        assert kept < 0.6
    assert resumed[0][0] == pytest.approx(saved[0][0], abs=tolerance / 10)


def mean_of_numbers() -> float:
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = optimizer.step(lambda: float(accelerator.process_index))
    accelerator.free_memory()
    return result


def test_a_closure_that_returns_a_number_returns_the_mean_over_ranks(ranks):
    """LBFGS decides by it how far to step, and how often to call the closure."""
    assert ranks.run(2, mean_of_numbers) == [0.5, 0.5]


def closure_with(settings: dict[str, Any]) -> tuple[str, bool]:
    """The error of a step with a closure in the first micro-batch, and whether the closure was called."""
    accelerator = Accelerator(config={"use_cpu": True, "num_processes": 1, **settings})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    called: list[bool] = []
    with accelerator.accumulate(model), pytest.raises(UsageError) as refused:
        optimizer.step(lambda: called.append(True))
    accelerator.free_memory()
    return str(refused.value), bool(called)


def test_a_closure_that_would_not_be_called_or_unscaled_is_refused(ranks):
    ((text, called),) = ranks.run(1, closure_with, {"shardkit": {"gradient_accumulation_steps": 2}})
    assert text == (
        "optimizer step: the closure would not be called before the last micro-batch of a window, and its samples "
        "would be lost (got micro-batch 1 of 2); call backward before step() in place of the closure, or compute all "
        "micro-batches in the closure, outside of accumulate()."
    )
    assert not called
    ((text, called),) = ranks.run(1, closure_with, {"mixed_precision": "fp16"})
    assert text == (
        "optimizer step: the closure's gradients would keep fp16's loss scale (got mixed_precision fp16); use bf16, or "
        "call backward before step() in place of the closure."
    )
    assert not called


class Around(torch.optim.Optimizer):
    """Steps another one, and is made without torch's __init__, as published versions of Lookahead are."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_around_another_one_needs_no_hooks():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    stepping.stepper_of(Around(torch.optim.SGD([parameter], lr=0.5))).step()
    assert parameter.tolist() == [0.5] * 3


def test_a_choice_of_the_user_is_kept():
    parameters = [nn.Parameter(torch.zeros(3))]
    for option in ({"foreach": True}, {"fused": False}, {"foreach": False}):
        optimizer = torch.optim.AdamW(parameters, **option)
        kernels.choose_kernels(optimizer)
        assert {key: optimizer.param_groups[0][key] for key in option} == option
        assert optimizer.param_groups[0]["fused"] is not True


def test_a_learning_rate_that_is_a_tensor_works_with_the_chosen_kernels():
    """Neither fused nor foreach kernels take complex parameters with one."""
    waves = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = torch.optim.Adam([waves, nn.Parameter(torch.zeros(3))], lr=torch.tensor(0.1))
    kernels.choose_kernels(optimizer)
    waves.grad = torch.ones_like(waves)
    optimizer.step()
    torch.testing.assert_close(waves.detach(), torch.full((3,), -0.1, dtype=torch.complex64))


def test_a_loaded_state_does_not_change_the_path():
    slow = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    slow.param_groups[0]["params"][0].grad = torch.ones(3)
    slow.step()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    kernels.choose_kernels(optimizer)
    kernels.choose_kernels(optimizer)
    optimizer.load_state_dict(slow.state_dict())
    assert optimizer.param_groups[0]["fused"] is True
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()


# The norm of all gradients


def norms(strategy: int, norm_type: float, with_plain: bool) -> tuple[float, float, float, int, str]:
    """(norm, norm in one process, largest difference of clipped gradients, all-reduces, type)."""
    torch.manual_seed(0)
    model: nn.Module = models.Scaled() if with_plain else models.Gpt()
    twin = copy.deepcopy(model)
    wrap = {"fsdp_transformer_layer_cls_to_wrap": "Sequential" if with_plain else "Block"}
    sharded = parallel(model, config_for(dist.get_world_size(), strategy, **wrap))
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) if with_plain else tokens(0)
    for module in (sharded, twin):
        (module(data).square().mean() * 5).backward()
    with Reductions() as reductions:
        found = clip.clip_grad_norm_(sharded.parameters(), 0.1, norm_type)
    count = len(reductions.dtypes)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
    difference = 0.0
    for mine, theirs in zip(sharded.parameters(), twin.parameters(), strict=True):
        whole = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        difference = max(difference, (whole - theirs.grad).abs().max().item())
    return found.item(), expected.item(), difference, count, type(found).__name__


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "norm_type", "with_plain", "world"),
    [(1, 2.0, False, 2), (1, 2.0, True, 4), (4, 2.0, True, 4), (5, float("inf"), True, 4), (2, 1.0, False, 2)],
)
def test_the_norm_is_global_with_one_all_reduce(ranks, strategy, norm_type, with_plain, world):
    for found, expected, difference, count, kind in ranks.run(world, norms, strategy, norm_type, with_plain):
        assert found == pytest.approx(expected, rel=1e-5)
        assert difference < 1e-6
        assert count == 1 and kind == "Tensor"


def test_without_ranks_it_is_torchs():
    model = models.Gpt()
    twin = copy.deepcopy(model)
    for module in (model, twin):
        models.next_token_loss(module, tokens(0)).backward()
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert clip.clip_grad_norm_(model.parameters(), 0.1) == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert clip.clip_grad_norm_([], 1.0) == 0
