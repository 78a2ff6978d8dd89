"""Optimizers of other libraries on sharded parameters: as in one process, or refused in words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.errors import UsageError
from shardkit.runtime import measure


class Net(nn.Module):
    """No size divides by 2 or 3; two parameters have a dim of one element, so that some ranks have nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 7)
        self.gain = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.full((1, 3), 0.5))
        self.out = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(x)) * self.gain) * self.wide


class Rule(torch.optim.Optimizer):
    """Steps by `self.update(parameter, gradient, state)`."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(self.update(p, p.grad, self.state[p]), alpha=self.defaults["lr"])
        return loss

    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        raise NotImplementedError


class NormsInPlace(Rule):
    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        ratio = p.norm().clamp_(min=0.1) / g.norm().add_(1e-3)
        return g * ratio / g.square().mean().sqrt_().add_(0.1) / (1 + g.abs().max() + p.norm(float("inf")))


class Factored(Rule):
    """Moments of rows and columns are plain tensors, as made by torch.zeros."""

    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if g.dim() < 2:
            return g
        rows = state.setdefault("rows", torch.zeros(g.shape[0]))
        columns = state.setdefault("columns", torch.zeros(g.shape[1]))
        rows.mul_(0.9).add_(g.square().mean(1), alpha=0.1)
        columns.lerp_(g.square().mean(0), 0.1)
        scale = torch.empty_like(g)
        torch.mul(rows[:, None], columns[None, :], out=scale)
        return g / scale.div_(rows.mean() + 1e-6).sqrt_().add_(0.1)


class Preconditioned(Rule):
    """A matrix of gradients, orthogonalized; a whole-model number in a plain tensor."""

    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        total = self.state.setdefault("total", torch.zeros(1))
        total += g.abs().sum()
        if g.dim() < 2:
            return g / (1 + total)
        left = state.setdefault("left", torch.eye(g.shape[0]))
        left.add_(g @ g.T)
        return torch.linalg.solve(left, g) / (1 + total)


class Flat(Rule):
    """Projects the gradient: both are flattened, which DTensor refuses for uneven parts."""

    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        flat, weights = g.flatten(), p.reshape(-1)
        return (flat - 0.1 * weights * torch.dot(flat, weights)).view(g.shape)


class Lacking(Rule):
    """Operators that DTensor has in no torch: out of place, in place, with sizes that the values decide."""

    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if g.dim() < 2:
            return g - g[g > 0].sum()
        g = torch.renorm(g, 2, 0, 0.5)
        g.renorm_(1, 1, 0.25)
        return g * torch.cdist(g, g).mean() + torch.nonzero(g).shape[0]


class Foreach(Rule):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        parameters = self.param_groups[0]["params"]
        gradients = [p.grad for p in parameters]
        slow = [self.state[p].setdefault("slow", p.clone()) for p in parameters]
        norms = torch._foreach_norm(gradients)
        torch._foreach_clamp_min_(norms, 0.1)
        updates = torch._foreach_addcdiv(gradients, gradients, [1 + g.abs() for g in gradients], 0.5)
        torch._foreach_maximum_(updates, -0.5)
        torch._foreach_div_(updates, norms)
        torch._foreach_add_(parameters, updates, alpha=-0.1)
        torch._foreach_lerp_(slow, parameters, 0.5)
        torch._foreach_copy_(parameters, slow)


class OwnKernel(Rule):
    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if type(g) is not torch.Tensor:
            raise TypeError("the kernel takes plain tensors")
        return g


@torch.library.custom_op("shardkit_tests::heavy_ball", mutates_args=("p", "momentum"))
def heavy_ball(g: torch.Tensor, p: torch.Tensor, momentum: torch.Tensor, lr: float) -> None:
    momentum.mul_(0.9).add_(g / (1 + g.norm()))
    p.sub_(momentum, alpha=lr)


class OwnOperator(Rule):
    """An operator of torch.ops that writes to its arguments, as those of bitsandbytes."""

    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        torch.ops.shardkit_tests.heavy_ball(g, p, momentum=momentum, lr=0.1)
        return torch.zeros_like(p)


@torch.compile(dynamic=False, fullgraph=True, backend="aot_eager")
def adam_update(g: torch.Tensor, moment: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    moment.lerp_(g, 0.1)
    variance.lerp_(g.square(), 0.05)
    return moment / ((variance / (1 - 0.95**count)).sqrt() + 0.1 + g.norm())


class CompilesItsUpdate(Rule):
    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if not state:
            state.update(moment=torch.zeros_like(p), variance=torch.zeros_like(p), count=torch.tensor(0.0))
        state["count"] += 1
        return adam_update(g, state["moment"], state["variance"], state["count"])


class WritesToFlat(Rule):
    def update(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        g.flatten().clamp_(-0.1, 0.1)
        return g


KINDS = [NormsInPlace, Factored, Preconditioned, Flat, Lacking, Foreach, OwnOperator, CompilesItsUpdate]


def batch(number: int) -> torch.Tensor:
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(number))


def trained(kind: type[Rule], strategy: int | None) -> dict[str, torch.Tensor]:
    """The weights after three steps, in plain torch without a strategy."""
    torch.manual_seed(1)
    model: Any = Net()
    optimizer: Any = kind(model.parameters())
    rank, world, backward = 0, 1, torch.Tensor.backward
    if strategy is not None:
        accelerator = Accelerator(config=Config(use_cpu=True, fsdp_config={"fsdp_sharding_strategy": strategy}))
        model, optimizer = accelerator.prepare(model, optimizer)
        rank, world, backward = accelerator.process_index, accelerator.num_processes, accelerator.backward
    for number in range(3):
        backward(model(batch(number).chunk(world)[rank]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def distance(kind: type[Rule], strategy: int) -> float:
    """The largest difference between the weights on ranks and in one process."""
    found, expected = trained(kind, strategy), trained(kind, None)
    return max(float((found[name.removeprefix("module.")] - p).abs().max()) for name, p in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [NormsInPlace, Factored, Preconditioned, Flat, Lacking, Foreach, OwnOperator, CompilesItsUpdate]
)
@pytest.mark.parametrize("world", [2, 3])
def test_weights_are_those_of_one_process(ranks, kind, world):
    assert max(ranks.run(world, distance, kind, 1)) < 1e-5


def trained_with_fused_kernels(kind: str, strategy: int) -> dict[str, torch.Tensor]:
    """The weights after three steps of an optimizer that is not prepared."""
    torch.manual_seed(1)
    accelerator = Accelerator(config=Config(use_cpu=True, fsdp_config={"fsdp_sharding_strategy": strategy}))
    model, rank, world = accelerator.prepare(Net()), accelerator.process_index, accelerator.num_processes
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True, **FUSED[kind])
    for number in range(3):
        accelerator.backward(model(batch(number).chunk(world)[rank]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


FUSED: dict[str, Any] = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Adagrad": {}, "AdamW": {}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUSED)
def test_fused_kernels_of_an_optimizer_that_is_not_prepared(ranks, kind):
    (expected,) = ranks.run(1, trained_with_fused_kernels, kind, 3)
    torch.testing.assert_close(ranks.run(2, trained_with_fused_kernels, kind, 1)[0], expected)


def test_the_memory_of_any_state_is_measured(alone):
    accelerator = Accelerator(config=Config(use_cpu=True, fsdp_config={"fsdp_sharding_strategy": 3}))
    model, optimizer = accelerator.prepare(net := Net(), Preconditioned(net.parameters()))
    accelerator.backward(model(batch(0)).square().mean())
    optimizer.step()
    assert measure.memory_of(accelerator._run).optimizer_bytes == 4 * (1 + 7**2 + 3**2 + 1**2)


def error_of(kind: type[Rule]) -> str:
    with pytest.raises(UsageError) as caught:
        trained(kind, 1)
    return str(caught.value)


def test_an_optimizer_that_cannot_step_on_sharded_parameters_is_refused_in_words(ranks):
    for text in ranks.run(2, error_of, OwnKernel):
        assert text.startswith("optimizer step: OwnKernel failed on sharded parameters (got TypeError: the kernel")
        assert text.endswith("); if it works in one process, use strategy NO_SHARD, or another optimizer.")


def test_writing_to_a_flattened_copy_is_refused(ranks):
    assert all("writing to this one would change nothing" in text for text in ranks.run(2, error_of, WritesToFlat))


def error_of_closure() -> str:
    model: Any = Net()
    accelerator = Accelerator(config=Config(use_cpu=True, fsdp_config={"fsdp_sharding_strategy": 1}))
    model, optimizer = accelerator.prepare(model, NormsInPlace(model.parameters()))

    def closure() -> torch.Tensor:
        raise RuntimeError("of the script's own")

    with pytest.raises(RuntimeError) as caught:
        optimizer.step(closure)
    return str(caught.value)


def stances_in_step() -> list[str]:
    """torch.compile's stance in the closure, which may run a compiled model, and after it in the optimizer's step."""
    found: list[str] = []

    def stance() -> torch.Tensor:
        found.append(torch._dynamo.eval_frame._stance.stance)
        return torch.zeros(())

    class Notes(NormsInPlace):
        def step(self, closure: Any = None) -> Any:
            closure()
            stance()

    accelerator = Accelerator(config=Config(use_cpu=True, fsdp_config={"fsdp_sharding_strategy": 1}))
    _, optimizer = accelerator.prepare(model := Net(), Notes(model.parameters()))
    optimizer.step(stance)
    stance()
    return found


def test_only_the_update_runs_without_the_compiler(ranks):
    assert ranks.run(2, stances_in_step)[0] == ["default", "force_eager", "default"]


def test_an_error_of_the_closure_stays_as_it_is(ranks):
    assert ranks.run(2, error_of_closure) == ["of the script's own"] * 2
