"""Programs that nobody wrote: what scripts do between two steps, drawn at random and done in a random order.

A program is given by its seed. Every operation draws what it needs from the seed and its own place, so that a program
can be cut down to the operations that matter: `program(run, seed, folder, ["train", "evaluate"])`.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.loops.net import Net, Part, evaluate, loss_of
from tests.loops.run import BY_SIZE, WHOLE, Loop, RanksRun, Run, whole

LENGTH = 14
OPERATIONS: dict[str, int] = {}
"""The names of the operations, and how often each is drawn."""


def operation(often: int = 1) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    def add(method: Callable[[Script], None]) -> Callable[[Script], None]:
        OPERATIONS[method.__name__] = often
        return method

    return add


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Judge(nn.Sequential):
    """Logits of `Net` -> numbers."""

    def __init__(self) -> None:
        super().__init__(Part(11), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1))


def settings_of(seed: int) -> Loop:
    draw = random.Random(f"settings {seed}")
    by_class = {"fsdp_transformer_layer_cls_to_wrap": "Part"}
    recomputed = {**by_class, "fsdp_activation_checkpointing": True}
    return Loop(program, draw.choice([1, 1, 2, 3]), draw.choice([by_class, recomputed, BY_SIZE, WHOLE]))


def program(run: Run, seed: int, folder: Path, operations: list[str] | None = None) -> list[str]:
    """Runs the program. Returns what each number in `run.seen` is of; after each operation follows a sum over all
    weights."""
    script = Script(run, seed, folder)
    script.start()
    if operations is None:
        names, often = zip(*OPERATIONS.items(), strict=True)
        operations = random.Random(seed).choices(names, often, k=LENGTH)
    said: list[str] = []
    for number, name in enumerate(operations):
        script.draw = random.Random(f"{seed} {number}")
        getattr(script, name)()
        run.see(sum(whole(p).abs().sum() for p in script.model.parameters()))  # type: ignore[arg-type]
        said += [f"{name}, operation {number}"] * (len(run.seen) - len(said))
    script.draw = random.Random(f"{seed} the end")  # what the last operation drew may depend on where it ran
    script.close_window()
    return said + ["the end"] * (len(run.seen) - len(said))


@dataclass
class Script:
    run: Run
    seed: int
    folder: Path
    draw: random.Random = field(default_factory=random.Random)
    batches: int = 0
    saved: dict[str, Any] = field(default_factory=dict)
    model_state: Any = None
    optimizer_states: Any = None
    average: list[torch.Tensor] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """What was prepared after the start, in that order: `judge` (a model and its optimizer), `teacher`."""
    hook: Any = None

    def start(self) -> None:
        self.draw = random.Random(f"start {self.seed}")
        torch.manual_seed(3)
        model = self.draw.choice([Net, Tied])()
        build, groups = self.draw.choice(OPTIMIZERS), self.draw.choice(GROUPS)
        optimizers = [build(some) for some in groups(model)]
        schedules = [self.draw.choice(SCHEDULES)(one) for one in optimizers] if self.draw.random() < 0.7 else []
        if self.draw.random() < 0.5:
            self.model, *rest = self.run.prepare(model, *optimizers, *schedules)
        else:
            self.model, *rest = [self.run.prepare(one) for one in (model, *optimizers, *schedules)]
        self.optimizers, self.schedules = rest[: len(optimizers)], rest[len(optimizers) :]
        self.inner = self.run.unwrap(self.model)

    # ---- what operations have in common ----

    @property
    def is_open(self) -> bool:
        return not self.run.is_step

    @property
    def has_windows(self) -> bool:
        return self.run.accumulation > 1

    def batch(self) -> torch.Tensor:
        self.batches += 1
        return self.run.batch(1000 + self.batches)

    def usual_loss(self) -> torch.Tensor:
        return loss_of(self.model, self.batch())

    def loss(self) -> torch.Tensor:
        kind = self.draw.choice(["usual"] * 4 + ["penalty", "two", "dropped", "evaluated", "consistency"])
        if kind == "penalty":
            squares = [p.square().sum() for fqn, p in self.inner.named_parameters() if fqn.endswith("weight")]
            return self.usual_loss() + 0.01 * sum(squares)
        if kind == "two":
            return self.usual_loss() + 0.5 * self.usual_loss()
        if kind == "dropped":
            self.usual_loss()
        loss = self.usual_loss()
        if kind == "evaluated":
            self.evaluate()
        if kind == "consistency":
            tokens = self.batch()
            with torch.no_grad():
                target = self.model(tokens)
            loss = loss + (self.model(tokens) - 0.5 * target).square().mean()
        return loss

    def step(self) -> None:
        self.run.step(*self.optimizers)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters() if p.grad is not None]

    # ---- training ----

    @operation(often=6)
    def micro_batch(self) -> None:
        with self.run.accumulate(self.model):
            loss = self.loss()
            self.run.backward(loss)
            if self.draw.random() < 0.15:
                self.run.backward(self.usual_loss())
            if self.draw.random() < 0.3 and (self.run.is_step or not self.run.is_plain):
                self.run.clip(self.model.parameters(), 0.5)
            self.step()
            if self.run.is_step or not self.run.is_plain:
                for one in self.schedules:
                    one.step()
        self.run.see_mean(loss)

    @operation(often=6)
    def window(self) -> None:
        for _ in range(self.run.accumulation):
            self.micro_batch()

    @operation()
    def close_window(self) -> None:
        while self.is_open:
            self.micro_batch()

    @operation(often=3)
    def train(self) -> None:
        """A step without `accumulate`, as the following ones."""
        if not self.has_windows:
            loss = self.loss()
            self.run.backward(loss)
            self.step()
            self.run.see_mean(loss)

    @operation()
    def train_in_eval_mode(self) -> None:
        self.model.eval()
        self.train()
        self.model.train()

    @operation(often=2)
    def two_backwards(self) -> None:
        if not self.has_windows:
            self.run.backward(self.usual_loss())
            self.draw.choice([self.evaluate, self.look_at_weights, self.look_at_gradients])()
            self.run.backward(0.5 * self.usual_loss())
            self.step()

    @operation(often=2)
    def without_exchange(self) -> None:
        if not self.has_windows:
            with self.run.no_sync(self.model):
                self.run.backward(self.usual_loss())
            self.draw.choice([self.evaluate, self.look_at_weights])()
            self.run.backward(self.usual_loss())
            self.step()

    @operation()
    def one_graph_twice(self) -> None:
        if not self.has_windows:
            loss = self.loss()
            self.run.backward(loss, retain_graph=True)
            self.run.backward(0.5 * loss)
            self.step()

    @operation()
    def change_gradients(self) -> None:
        if not self.has_windows:
            self.run.backward(self.usual_loss())
            change = self.draw.choice([_halve, _decay, _clamp])
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        change(parameter)
            self.step()

    @operation()
    def clip_by_torch(self) -> None:
        if not self.has_windows:
            self.run.backward(self.usual_loss())
            self.run.see(nn.utils.clip_grad_norm_(self.model.parameters(), 0.3))
            self.step()

    @operation()
    def drop_gradients(self) -> None:
        if not self.has_windows:
            self.run.backward(self.usual_loss())
            for one in self.draw.choice([self.optimizers, [self.model]]):
                one.zero_grad()

    @operation(often=2)
    def distill(self) -> None:
        if "teacher" in self.more and not self.has_windows:
            tokens = self.batch()
            with torch.no_grad():
                target = self.more["teacher"](tokens)
            loss = (self.model(tokens) - target).square().mean() + 0.1 * self.usual_loss()
            self.run.backward(loss)
            self.step()
            self.run.see_mean(loss)

    @operation(often=2)
    def adversaries(self) -> None:
        if self.has_windows:
            return
        judge, optimizer = self._made("judge")
        made = self.model(self.batch())
        for judged, target, steps in ((made.detach(), 0.0, [optimizer]), (made, 1.0, self.optimizers)):
            loss = (judge(judged) - target).square().mean()
            self.run.backward(loss)
            self.run.step(*steps)
            self.run.see_mean(loss)
        optimizer.zero_grad()

    def _made(self, name: str) -> Any:
        if name not in self.more:
            torch.manual_seed(5)
            if name == "judge":
                judge = Judge()
                self.more[name] = self.run.prepare(judge, OPTIMIZERS[0](judge.parameters()))
            else:
                self.more[name] = self.run.prepare(type(self.inner)()).requires_grad_(False).eval()
        return self.more[name]

    # ---- between steps ----

    @operation(often=3)
    def evaluate(self) -> None:
        evaluate(self.run, self.model, self.draw.choice([torch.no_grad, torch.inference_mode]))

    @operation()
    def forward_without_gradients(self) -> None:
        with torch.no_grad():
            self.run.see_mean(self.usual_loss())

    @operation()
    def look_at_weights(self) -> None:
        for parameter in self.parameters()[:3]:
            self.run.see(parameter.detach().norm())

    @operation()
    def look_at_gradients(self) -> None:
        if not self.is_open:
            for gradient in self.gradients()[:4]:
                self.run.see(gradient.norm())

    @operation(often=2)
    def zero_grad(self) -> None:
        if not (self.run.is_plain and self.is_open):  # prepared optimizers keep the gradients of an open window
            self.draw.choice(self.optimizers).zero_grad(set_to_none=self.draw.random() < 0.7)

    @operation(often=2)
    def freeze(self) -> None:
        """Between windows, as `unfreeze`: in one, hybrid strategies refuse it (`parts_frozen_in_a_window`)."""
        if self.is_open:
            return
        chosen = self.draw.choice(["parts.0", "norm", "parts.1.up", "parts.1.down", "embed"])
        self.inner.get_submodule(chosen).requires_grad_(self.draw.random() < 0.4)

    @operation()
    def unfreeze(self) -> None:
        if not self.is_open:
            self.model.requires_grad_(True)

    @operation()
    def change_learning_rate(self) -> None:
        factor = self.draw.choice([0.5, 1.1])
        for group in [group for one in self.optimizers for group in one.param_groups]:
            group["lr"] *= factor

    @operation()
    def write_weights(self) -> None:
        first, second = self.inner.parts
        with torch.no_grad():
            if self.draw.random() < 0.5:
                for parameter in first.parameters():
                    parameter.mul_(0.95)
            else:
                for parameter, other in zip(first.parameters(), second.parameters(), strict=True):
                    parameter.copy_(other)
        self.inner.norm.weight.data = self.inner.norm.weight.data * 0.9

    @operation()
    def hook_on_or_off(self) -> None:
        if self.hook is None:
            self.hook = self.inner.norm.register_forward_hook(lambda module, arguments, out: 1.01 * out)
        else:
            self.hook.remove()
            self.hook = None

    @operation(often=2)
    def average_weights(self) -> None:
        if self.average is None:
            self.average = [p.detach().clone() for p in self.parameters()]
        with torch.no_grad():
            for average, parameter in zip(self.average, self.parameters(), strict=True):
                average.lerp_(parameter, 0.3)

    @operation()
    def evaluate_averages(self) -> None:
        if self.average is not None:
            own = [p.detach().clone() for p in self.parameters()]
            self._take(self.average)
            self.evaluate()
            if self.draw.random() < 0.7:
                self._take(own)

    def _take(self, weights: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters(), weights, strict=True):
                parameter.copy_(weight)

    @operation()
    def teach(self) -> None:
        """The teacher takes the present weights."""
        with torch.no_grad():
            for mine, theirs in zip(self._made("teacher").parameters(), self.parameters(), strict=True):
                mine.copy_(theirs)

    # ---- states ----

    @operation()
    def keep_model(self) -> None:
        self.model_state = copy.deepcopy(self.model.state_dict())

    @operation()
    def take_model(self) -> None:
        if self.model_state is not None:
            self.model.load_state_dict(self.model_state)

    @operation()
    def keep_optimizers(self) -> None:
        self.optimizer_states = [copy.deepcopy(one.state_dict()) for one in self.optimizers]

    @operation()
    def take_optimizers(self) -> None:
        for one, state in zip(self.optimizers, self.optimizer_states or (), strict=False):
            one.load_state_dict(state)

    @operation(often=2)
    def save(self) -> None:
        if not self.is_open:
            self._save(self.draw.choice("ab"))

    @operation()
    def load(self) -> None:
        name = self.draw.choice("ab")
        if not self.is_open and name in self.saved and self.saved[name][0] == [*self.more]:
            self._load(name)

    @operation()
    def restart(self) -> None:
        """Everything anew, in the state of a checkpoint; weights that were frozen are trained again."""
        if self.is_open:
            return
        self._save("restart")
        names, self.more, self.average, self.hook = [*self.more], {}, None, None
        self.run.free()
        self.start()
        for name in names:
            self._made(name)
        self._load("restart")

    def _save(self, name: str) -> None:
        state = None
        if isinstance(self.run, RanksRun):
            self.run.accelerator.save_state(str(self.folder / name))
        else:
            state = copy.deepcopy([one.state_dict() for one in self._objects()])
        self.saved[name] = [*self.more], state

    def _load(self, name: str) -> None:
        if isinstance(self.run, RanksRun):
            self.run.accelerator.load_state(str(self.folder / name))
        else:
            for one, state in zip(self._objects(), copy.deepcopy(self.saved[name][1]), strict=True):
                one.load_state_dict(state)

    def _objects(self) -> list[Any]:
        more = [one for made in self.more.values() for one in (made if isinstance(made, tuple) else (made,))]
        return [self.model, *self.optimizers, *self.schedules, *more]


def _halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def _decay(parameter: nn.Parameter) -> None:
    parameter.grad.add_(parameter, alpha=0.01)


def _clamp(parameter: nn.Parameter) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


# Large epsilons: some gradients are zero but for rounding.
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda given: torch.optim.AdamW(given, lr=1e-2, eps=1e-3),
    lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9),
    lambda given: torch.optim.Adagrad(given, lr=0.02, eps=1e-3),
    lambda given: torch.optim.RMSprop(given, lr=3e-3, eps=1e-2),
]
SCHEDULES: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step)),
]


def _one_group(model: nn.Module) -> list[Any]:
    return [model.parameters()]


def _two_groups(model: nn.Module) -> list[Any]:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    return [[{"params": matrices}, {"params": vectors, "lr": 0.003}]]


def _two_optimizers(model: nn.Module) -> list[Any]:
    first = list(model.get_submodule("parts.0").parameters())
    return [first, [p for p in model.parameters() if all(p is not one for one in first)]]


# What each optimizer of a program is given.
GROUPS = [_one_group, _two_groups, _two_optimizers]
