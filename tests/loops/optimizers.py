"""Optimizers, and averages of weights, as scripts bring their own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tests.loops.net import Net, adam, cross_entropy, evaluate, loss_of, started, train
from tests.loops.run import BATCH, BY_SIZE, LOOPS, WORDS, Loop, Run, loop, whole


class Averages:
    """Averaged weights, as many scripts write them."""

    def __init__(self, model: nn.Module, how: str) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.how = how

    def update(self, model: nn.Module) -> None:
        for average, p in zip(self.shadow, model.parameters(), strict=True):
            average.mul_(0.8).add_(p.detach(), alpha=0.2)

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        kept = [p.detach().clone() for p in model.parameters()]
        self._set(model, self.shadow)
        yield
        self._set(model, kept)

    def _set(self, model: nn.Module, values: list[torch.Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            if self.how == "assign":
                p.data = value.clone()
            elif self.how == "data":
                p.data.copy_(value)
            else:
                with torch.no_grad():
                    p.copy_(value)


def _averaging(how: str) -> Any:
    def averaging(run: Run) -> None:
        model, optimizer = started(run)
        averages = Averages(model, how)
        for step in range(run.steps):
            loss = loss_of(model, run.batch(step))
            run.backward(loss)
            run.step(optimizer)
            averages.update(model)
            with averages.swapped_in(model):
                evaluate(run, model)
            run.see_mean(loss)
            evaluate(run, model)

    return averaging


for _how in ("assign", "data", "copy"):
    LOOPS[f"averages_swapped_in_by_{_how}"] = Loop(_averaging(_how))


class ScheduleFree(torch.optim.Optimizer):
    """Gradients are taken at one point, and the weights to use are another: train() and eval() change between them."""

    def __init__(self, parameters: Any, lr: float = 0.3) -> None:
        super().__init__(parameters, {"lr": lr, "mode": "train"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 0.2)
                z.sub_(p.grad, alpha=group["lr"])
                p.sub_(p.grad, alpha=0.5 * group["lr"])

    def _move(self, mode: str, weight: float) -> None:
        for group in self.param_groups:
            if group["mode"] != mode:
                group["mode"] = mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"].data, weight)

    def eval(self) -> None:
        self._move("eval", 0.1)

    def train(self) -> None:
        self._move("train", -1 / 9)


@loop()
def schedule_free(run: Run) -> None:
    model = Net()
    model, optimizer = run.prepare(model, ScheduleFree(model.parameters()))
    for step in range(run.steps):
        optimizer.train()
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        optimizer.eval()
        evaluate(run, model)
    optimizer.train()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware: first_step climbs to where the loss is worst, second_step comes back and steps."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.how = how
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.3, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [whole(p.grad.norm()) for p in self._with_gradient()]
        norm = torch.stack(norms).norm()
        for p in self._with_gradient():
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / float(norm)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._with_gradient():
            if self.how == "assign":
                p.data = self.state[p]["old"]
            else:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def _with_gradient(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


def _sharpness_aware(how: str) -> Any:
    def sharpness_aware(run: Run) -> None:
        model = Net()
        model, optimizer = run.prepare(model, Sam(model.parameters(), how))
        for step in range(run.steps):
            loss = loss_of(model, run.batch(step))
            run.backward(loss)
            optimizer.first_step()
            again = loss_of(model, run.batch(step))
            run.backward(again)
            optimizer.second_step()
            run.see_mean(loss)
            run.see_mean(again)

    return sharpness_aware


LOOPS["sharpness_aware_by_assigning"] = Loop(_sharpness_aware("assign"))


LOOPS["sharpness_aware_by_copying"] = Loop(_sharpness_aware("copy"))


class Lion(torch.optim.Optimizer):
    """An elementwise optimizer of somebody's own."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_(torch.tanh(10 * (0.9 * m + 0.1 * p.grad)), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "adamw_one_by_one": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=False),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), eps=1e-4),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.9),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lion": lambda p: Lion(p),
}
if find_spec("transformers") is not None:  # which machines with other devices may lack
    OPTIMIZERS["transformers_adafactor"] = lambda p: transformers_adafactor(p)


def transformers_adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, scale_parameter=True, relative_step=False, beta1=0.9)


def _with(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    def with_optimizer(run: Run) -> None:
        model = Net()
        model, optimizer = run.prepare(model, make(model.parameters()))
        train(run, model, optimizer)
        evaluate(run, model)

    return with_optimizer


for _name, _make in OPTIMIZERS.items():
    LOOPS[f"with_{_name}"] = Loop(_with(_make))


@loop()
def with_rprop(run: Run) -> None:
    """Only signs of gradients count: those that are zero but for rounding are left out."""
    model = Net()
    model, optimizer = run.prepare(model, torch.optim.Rprop(model.parameters(), lr=1e-3))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        for p in model.parameters():
            p.grad.mul_((p.grad.abs() > 1e-5).to(p.grad.dtype))
        run.step(optimizer)
        run.see_mean(loss)


def with_muon(run: Run) -> None:
    """Matrices by Muon, the rest by AdamW."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    flat = [p for p in model.parameters() if p.dim() == 1]
    model, muon, rest = run.prepare(model, torch.optim.Muon(matrices, lr=1e-2), adam(flat))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step)))
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        run.backward(loss)
        run.step(muon, rest)
        run.see_mean(loss)


LOOPS["with_muon"] = Loop(with_muon, fsdp=BY_SIZE, bound=2e-4)  # its matrices are bf16


_NO_SHARD = "use strategy NO_SHARD"


@loop(refused={1: _NO_SHARD, 2: _NO_SHARD, 4: _NO_SHARD, 5: _NO_SHARD})
def with_lbfgs(run: Run) -> None:
    """A closure that is called several times a step; its loss decides how far the step goes."""
    model = Net()
    make = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    model, optimizer = run.prepare(model, make)
    for step in range(run.steps):

        def closure(number: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, run.batch(number))
            run.backward(loss)
            return loss

        optimizer.step(closure)
        evaluate(run, model)


@loop()
def with_a_closure(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):

        def closure(number: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, run.batch(number))
            run.backward(loss)
            return loss

        run.see_mean(optimizer.step(closure))


@loop()
def stepped_before_prepare(run: Run) -> None:
    """An optimizer that has state already."""
    model = Net()
    optimizer = adam(model.parameters())
    for number in range(2):
        loss_of(model, torch.full((4, 6), number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = run.prepare(model, optimizer)
    train(run, model, optimizer)


@loop()
def optimizer_that_is_not_prepared(run: Run) -> None:
    model = run.prepare(Net())
    optimizer = adam(model.parameters())
    train(run, model, optimizer)


@loop()
def descent_by_hand(run: Run) -> None:
    """No optimizer at all."""
    model = run.prepare(Net())
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        run.see_mean(loss)


@loop()
def groups_added_later(run: Run) -> None:
    """The embedding is trained from the middle of the run on."""
    model = Net()
    model.embed.requires_grad_(False)
    rest = [p for name, p in model.named_parameters() if "embed" not in name]
    model, optimizer = run.prepare(model, adam(rest))
    train(run, model, optimizer)
    run.unwrap(model).embed.requires_grad_(True)
    optimizer.add_param_group({"params": list(run.unwrap(model).embed.parameters()), "lr": 0.05})
    train(run, model, optimizer, 10)


@loop()
def state_changed_by_hand(run: Run) -> None:
    """Momentum reset in the middle of a run, as some schedules do."""
    model, optimizer = started(run)
    train(run, model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2
    train(run, model, optimizer, 10)
    optimizer.state.clear()
    train(run, model, optimizer, 20)


@loop()
def learning_rates_changed_by_hand(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def state_dict_of_the_optimizer_loaded(run: Run) -> None:
    """The optimizer's own state_dict goes back and forth in one run."""
    model, optimizer = started(run)
    train(run, model, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    weights = [p.detach().clone() for p in model.parameters()]
    train(run, model, optimizer, 50)
    optimizer.load_state_dict(kept)
    with torch.no_grad():
        for p, value in zip(model.parameters(), weights, strict=True):
            p.copy_(value)
    train(run, model, optimizer, 10)


class Adversarial(Net):
    """A network with its critic, which `parameters()` leaves out, as models with their discriminator do."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WORDS, 7), nn.Tanh(), nn.Linear(7, 1))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (p for name, p in self.named_parameters(recurse=recurse) if not name.startswith("critic."))

    def forward(self, tokens: torch.Tensor, of_critic: bool = False) -> torch.Tensor:
        logits = super().forward(tokens[:, :-1])
        if of_critic:
            return self.critic(logits.detach()).pow(2).mean() - self.critic(logits.detach()).mean()
        return cross_entropy(logits, tokens) - 0.1 * self.critic(logits).mean()


@loop(shardkit={"ddp_find_unused_parameters": True})
def a_model_whose_parameters_leave_some_out(run: Run) -> None:
    torch.manual_seed(0)
    model = Adversarial()
    model, own, critics = run.prepare(model, adam(model.parameters()), adam(model.critic.parameters()))
    for step in range(run.steps):
        for optimizer, trained in ((own, model), (critics, run.unwrap(model).critic)):
            loss = model(run.batch(step), of_critic=optimizer is critics)
            run.backward(loss)
            run.clip(trained.parameters(), 1.0)
            run.step(optimizer)
            critics.zero_grad()
            run.see_mean(loss)
