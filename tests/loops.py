"""Training loops as people write them, each written once: it runs in plain torch in one process, and on ranks.

A loop is a function of a `Run`, which has the few calls that differ. What it `see`s (losses, norms, predictions) and
the weights that it ends with must be the same everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.errors import ShardkitError

BATCH = 12  # samples of a global batch: 1, 2, 3 and 4 ranks divide it
WORDS = 11

Loop = Callable[["Run"], Any]
LOOPS: dict[str, Loop] = {}


WITHOUT_PARTS = ("gradient", "generator_and_critic", "one_optimizer_for_two_models")
"""Beginnings of the names of loops whose models have no `Part`: they are cut by size."""


REFUSED = {"gradient_penalty_alone": {3: "shardkit.ddp_find_unused_parameters: true"}}
"""Loops that a strategy refuses on several ranks, by strategy: what the error advises."""


def loop(function: Loop) -> Loop:
    """One more loop of the matrix."""
    LOOPS[function.__name__] = function
    return function


@dataclass
class Run:
    """Plain torch in one process: nothing is prepared, and every batch is the global one."""

    steps: int = 4
    accumulation: int = 1
    seen: list[float] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    micro: int = 0
    is_plain: bool = True

    def prepare(self, *objects: Any) -> Any:
        self.models += [one for one in objects if isinstance(one, nn.Module)]
        return objects[0] if len(objects) == 1 else objects

    def batch(self, number: int, size: int = BATCH) -> torch.Tensor:
        """This process's part of a global batch of tokens (samples, 6)."""
        return self.part(torch.randint(0, WORDS, (size, 6), generator=torch.Generator().manual_seed(number)))

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def loader(self, samples: int, size: int = BATCH) -> Any:
        data = torch.randint(0, WORDS, (samples, 6), generator=torch.Generator().manual_seed(99))
        return DataLoader(data, batch_size=size)

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        (loss / self.accumulation).backward(**arguments)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[bool]:
        """Yields nothing; `is_step` says whether this micro-batch is its window's last."""
        self.micro += 1
        yield True

    @property
    def is_step(self) -> bool:
        return self.micro % self.accumulation == 0

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Step and zero_grad, where the window is full."""
        if self.is_step:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def clip(self, parameters: Any, limit: float) -> None:
        self.see(nn.utils.clip_grad_norm_(parameters, limit))

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over the global batch of a value that is a mean over this process's part."""
        return value.detach()

    def see(self, value: torch.Tensor) -> None:
        """A number that must be the same everywhere."""
        self.seen.append(float(value.detach()))

    def see_mean(self, value: torch.Tensor) -> None:
        self.see(self.mean(value))

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def free(self) -> None:
        self.models.clear()

    def weights(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{fqn}": whole(t) for i, model in enumerate(self.models) for fqn, t in named(self.unwrap(model))}


@dataclass
class RanksRun(Run):
    """The same on ranks, by an Accelerator."""

    accelerator: Any = None
    is_plain: bool = False

    def prepare(self, *objects: Any) -> Any:
        prepared = self.accelerator.prepare(*objects)
        several = prepared if isinstance(prepared, tuple) else (prepared,)
        self.models += [one for one in several if isinstance(one, nn.Module)]
        return prepared

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def loader(self, samples: int, size: int = BATCH) -> Any:
        return super().loader(samples, size // self.accelerator.num_processes)

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        self.accelerator.backward(loss, **arguments)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[bool]:
        self.micro += 1
        with self.accelerator.accumulate(*models):
            yield True

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def clip(self, parameters: Any, limit: float) -> None:
        norm = self.accelerator.clip_grad_norm_(parameters, limit)
        if self.accelerator.sync_gradients:
            self.see(norm)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value.detach(), "mean")

    def see(self, value: torch.Tensor) -> None:
        super().see(whole(value))

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model)

    def free(self) -> None:
        super().free()
        self.accelerator.free_memory()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()


def plain(function: Loop, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    """What a loop sees and ends with in plain torch."""
    run = Run(**settings)
    torch.manual_seed(0)
    function(run)
    return run.seen, {name: tensor.double().numpy().copy() for name, tensor in run.weights().items()}


def on_ranks(name: str, strategies: tuple[int, ...], settings: dict[str, Any]) -> dict[int, Any]:
    """The same by an Accelerator, for each strategy: runs on every rank. What a strategy refuses is its text."""
    found: dict[int, Any] = {}
    for strategy in strategies:
        by_size = name.startswith(WITHOUT_PARTS) or name.endswith("_without_blocks")
        wrap = {} if not by_size else {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 30}
        config = config_of(strategy, settings.get("accumulation", 1), dist.get_world_size(), **wrap)
        accelerator = Accelerator(config=config)
        run = RanksRun(accelerator=accelerator, **settings)
        torch.manual_seed(0)
        if strategy in REFUSED.get(name, {}) and dist.get_world_size() > 1:
            found[strategy] = _refusal(LOOPS[name], run)
            continue
        LOOPS[name](run)
        weights = {key: tensor.double().numpy().copy() for key, tensor in run.weights().items()}
        found[strategy] = run.seen, weights
        accelerator.free_memory()
    return found


def _refusal(function: Loop, run: Run) -> str:
    try:
        function(run)
    except ShardkitError as error:
        return str(error)
    return "not refused"


def config_of(strategy: int, accumulation: int, world: int, **fsdp: Any) -> Config:
    """Small units; hybrid strategies on four ranks are 2 x 2, else each rank is a replica."""
    sizes = {"replicate_size": 2, "shard_size": 2} if world == 4 else {"replicate_size": world, "shard_size": 1}
    return Config(
        use_cpu=True,
        num_processes=world,
        fsdp_config={
            "fsdp_sharding_strategy": strategy,
            **(fsdp or {"fsdp_transformer_layer_cls_to_wrap": "Part"}),
        },
        shardkit={
            "gradient_accumulation_steps": accumulation,
            **({"mesh": sizes} if strategy in (4, 5) else {}),
        },
    )


# ---- the model ----


class Part(nn.Module):
    """The block that is a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Tokens (batch, 6) -> logits (batch, 6, WORDS). No size divides by 2 or 3."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.parts = nn.ModuleList(Part(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.features(tokens[:, :-1])), tokens)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(tokens[:, :-1]), tokens)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)  # a large epsilon: some gradients are zero but for rounding


def evaluate(run: Run, model: nn.Module, context: Any = torch.no_grad) -> None:
    """What an evaluation gives; the model is left as it was found."""
    model.eval()
    with context():
        run.see_mean(loss_of(model, run.batch(777)))
    model.train()


def started(run: Run, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net() if model is None else model
    return run.prepare(model, adam(model.parameters()))


# ---- the loops ----


@loop
def usual(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


def _evaluations(context: Any) -> Loop:
    """An evaluation at every place of a step."""

    def everywhere(run: Run) -> None:
        model, optimizer = started(run)
        evaluate(run, model, context)
        for step in range(run.steps):
            evaluate(run, model, context)
            loss = loss_of(model, run.batch(step))
            evaluate(run, model, context)
            run.backward(loss)
            evaluate(run, model, context)
            run.clip(model.parameters(), 1.0)
            evaluate(run, model, context)
            optimizer.step()
            evaluate(run, model, context)
            optimizer.zero_grad()
            evaluate(run, model, context)
            run.see_mean(loss)
        evaluate(run, model, context)

    return everywhere


LOOPS["evaluations_without_grad"] = _evaluations(torch.no_grad)
LOOPS["evaluations_in_inference_mode"] = _evaluations(torch.inference_mode)
LOOPS["evaluations_with_grad"] = _evaluations(nullcontext)


@loop
def optimizer_built_after_an_evaluation(run: Run) -> None:
    model = run.prepare(Net())
    evaluate(run, model)
    optimizer = run.prepare(adam(model.parameters()))
    _train(run, model, optimizer)


@loop
def optimizer_built_after_a_forward_with_grad(run: Run) -> None:
    model = run.prepare(Net())
    loss_of(model, run.batch(5))
    optimizer = run.prepare(adam(model.parameters()))
    _train(run, model, optimizer)


def _train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def unfreezing_in_phases(run: Run) -> None:
    """The head alone; after an evaluation the embedding too; then everything."""
    model, optimizer = started(run)
    model.requires_grad_(False)
    for chosen in (run.unwrap(model).head, run.unwrap(model).embed, model):
        chosen.requires_grad_(True)
        _train(run, model, optimizer)
        evaluate(run, model)


@loop
def frozen_whole_at_first(run: Run) -> None:
    model = Net().requires_grad_(False)
    model = run.prepare(model)
    evaluate(run, model)
    model.requires_grad_(True)
    _train(run, model, run.prepare(adam(model.parameters())))


@loop
def freezing_again(run: Run) -> None:
    model, optimizer = started(run)
    _train(run, model, optimizer)
    run.unwrap(model).embed.requires_grad_(False)
    run.unwrap(model).parts[1].requires_grad_(False)
    _train(run, model, optimizer, 10)
    model.requires_grad_(True)
    _train(run, model, optimizer, 20)


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


def _averaging(how: str) -> Loop:
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
    LOOPS[f"averages_swapped_in_by_{_how}"] = _averaging(_how)


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


@loop
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


def _sharpness_aware(how: str) -> Loop:
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


LOOPS["sharpness_aware_by_assigning"] = _sharpness_aware("assign")
LOOPS["sharpness_aware_by_copying"] = _sharpness_aware("copy")


@loop
def a_method_besides_forward(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = run.unwrap(model).loss(run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def methods_and_forward_take_turns(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens = run.batch(step)
        loss = run.unwrap(model).loss(tokens) if step % 2 else loss_of(model, tokens)
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def inner_modules_called_from_outside(run: Run) -> None:
    """Embeddings given to the model's parts by hand, as multimodal models and prompt tuning do."""
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens, inner = run.batch(step), run.unwrap(model)
        x = inner.embed(tokens[:, :-1]) * 1.5
        x = inner.parts[0].down(torch.relu(inner.parts[0].up(x)))
        x = inner.parts[1](x)
        loss = cross_entropy(inner.head(inner.norm(x)), tokens)
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def two_forwards_one_backward(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step)) + 0.5 * loss_of(model, run.batch(step + 100))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def two_forwards_two_backwards(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        first, second = loss_of(model, run.batch(step)), loss_of(model, run.batch(step + 100))
        run.backward(first)
        run.backward(second)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(first + second)


@loop
def two_losses_of_one_forward(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        logits = model(run.batch(step)[:, :-1])
        loss, other = cross_entropy(logits, run.batch(step)), logits.pow(2).mean()
        run.backward(loss, retain_graph=True)
        run.backward(other)
        run.step(optimizer)
        run.see_mean(loss + other)


@loop
def losses_of_different_parts(run: Run) -> None:
    """The first loss ends in the middle of the model, the second at its end."""
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens, inner = run.batch(step), run.unwrap(model)
        early = inner.parts[0](inner.embed(tokens)).pow(2).mean()
        run.backward(early)
        late = loss_of(model, tokens)
        run.backward(late)
        run.step(optimizer)
        run.see_mean(early + late)


@loop
def gradient_penalty(run: Run) -> None:
    """The gradient of the output by its input is part of the loss, as in WGAN-GP."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).requires_grad_()
        value = model(x)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        loss = value.mean() + 2.0 * (gradient.norm(dim=1) - 1).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)
        run.see_mean(model(x.detach()).mean())


@loop
def gradient_penalty_alone(run: Run) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = gradient.pow(2).sum(1).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        for parameter in model.parameters():
            assert parameter.grad is None


@loop
def gradients_of_inputs_without_a_step(run: Run) -> None:
    """Saliency between training steps: the gradient of a gradient is never used."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).requires_grad_()
        for create_graph in (False, True):
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
            run.see_mean(gradient.pow(2).mean())
        loss = model(x.detach()).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def generator_and_critic(run: Run) -> None:
    """Two models and two optimizers that take turns; the critic's gradients from the generator's loss are dropped."""
    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
    critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    generator, critic, for_generator, for_critic = run.prepare(
        generator, critic, adam(generator.parameters()), adam(critic.parameters())
    )
    for step in range(run.steps):
        noise = torch.Generator().manual_seed(step)
        z, real = run.part(torch.randn(BATCH, 3, generator=noise)), run.part(torch.randn(BATCH, 5, generator=noise))
        fake = generator(z)
        loss = critic(fake.detach()).mean() - critic(real).mean() + critic(real).pow(2).mean()
        run.backward(loss)
        run.step(for_critic)
        run.see_mean(loss)
        loss = -critic(generator(z)).mean()
        run.backward(loss)
        run.step(for_generator)
        for_critic.zero_grad()
        run.see_mean(loss)


@loop
def one_optimizer_for_two_models(run: Run) -> None:
    torch.manual_seed(2)
    first, second = nn.Linear(3, 5), nn.Linear(5, 1)
    first, second, optimizer = run.prepare(
        first, second, adam([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.1}])
    )
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step)))
        loss = second(torch.tanh(first(x))).pow(2).mean()
        run.backward(loss)
        run.clip([*first.parameters(), *second.parameters()], 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def two_optimizers_for_one_model(run: Run) -> None:
    model = Net()
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() == 1]
    model, first, second = run.prepare(model, adam(wide), torch.optim.SGD(flat, lr=0.1, momentum=0.9))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(first, second)
        run.see_mean(loss)


@loop
def teacher_and_student(run: Run) -> None:
    """The teacher is frozen, prepared too, and run with gradients enabled."""
    teacher, student = Net().requires_grad_(False), Net()
    teacher, student, optimizer = run.prepare(teacher, student, adam(student.parameters()))
    for step in range(run.steps):
        tokens = run.batch(step)
        loss = (student(tokens) - teacher(tokens)).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def the_model_is_its_own_teacher(run: Run) -> None:
    """A forward without gradients, of the same model, between a forward with them and its backward."""
    model, optimizer = started(run)
    for step in range(run.steps):
        logits = model(run.batch(step))
        with torch.no_grad():
            target = model(run.batch(step + 50))
        loss = (logits - target).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


def _odd_outputs(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any], blocks: bool) -> Loop:
    """What forward returns is no tensor."""

    class Odd(Net):
        def forward(self, tokens: torch.Tensor) -> Any:
            return wrap(cross_entropy(super().forward(tokens[:, :-1]), tokens))

    def odd_outputs(run: Run) -> None:
        torch.manual_seed(0)
        model = Odd()
        if not blocks:
            model.parts = nn.ModuleList()
        model, optimizer = started(run, model)
        for step in range(run.steps):
            loss = unwrap(model(run.batch(step)))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)

    return odd_outputs


@dataclass
class Output:
    loss: torch.Tensor
    other: Any = None


class Opaque:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


for _name, _wrap in {
    "a_dataclass": Output,
    "a_namespace": lambda loss: SimpleNamespace(loss=loss),
    "an_object": Opaque,
}.items():
    LOOPS[f"forward_returns_{_name}"] = _odd_outputs(_wrap, lambda output: output.loss, True)
    LOOPS[f"forward_returns_{_name}_without_blocks"] = _odd_outputs(_wrap, lambda output: output.loss, False)
LOOPS["forward_returns_a_dict_of_lists"] = _odd_outputs(lambda x: {"a": [None, x], "b": 3}, lambda o: o["a"][1], True)


class KeepsLoss(Net):
    """The loss is left on the module."""

    def forward(self, tokens: torch.Tensor) -> None:
        self.kept = cross_entropy(super().forward(tokens[:, :-1]), tokens)


@loop
def the_loss_is_kept_on_the_module(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, KeepsLoss())
    for step in range(run.steps):
        model(run.batch(step))
        loss = run.unwrap(model).kept
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def a_penalty_on_weights(run: Run) -> None:
    """Added to the gradients by hand: weight decay as some scripts write it."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=0.1)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def noise_and_signs_on_gradients(run: Run) -> None:
    """Gradients changed and replaced between backward and step."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        for p in model.parameters():
            p.grad = torch.sign(p.grad) * 0.1 + p.grad.clamp(-0.5, 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop
def weights_clamped_after_a_step(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)
        run.see_mean(loss)


@loop
def weights_reset_in_training(run: Run) -> None:
    """A head begun anew in the middle of a run."""
    model, optimizer = started(run)
    _train(run, model, optimizer)
    with torch.no_grad():
        run.unwrap(model).head.weight.zero_()
        run.unwrap(model).head.bias.fill_(0.1)
    _train(run, model, optimizer, 10)


@loop
def a_forward_that_raised(run: Run) -> None:
    """An exception in the middle of forward, caught; the step is tried again."""
    model, optimizer = started(run)
    broken = run.unwrap(model).norm.register_forward_pre_hook(_raise_once())
    for step in range(run.steps):
        try:
            loss = loss_of(model, run.batch(step))
        except FloatingPointError:
            assert run.is_plain or not run.accelerator.use_distributed or all_whole_or_sharded(model)
            loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    broken.remove()


def all_whole_or_sharded(model: nn.Module) -> bool:
    return len({isinstance(p, DTensor) for p in model.parameters()}) == 1


def _raise_once() -> Callable[..., None]:
    raised: list[int] = []

    def hook(*_: Any) -> None:
        if not raised:
            raised.append(1)
            raise FloatingPointError("once")

    return hook


class RaisesOnce(torch.autograd.Function):
    raised: set[int] = set()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: int) -> torch.Tensor:
        ctx.key = key
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.key not in RaisesOnce.raised:
            RaisesOnce.raised.add(ctx.key)
            raise FloatingPointError("once")
        return gradients[0], None


@loop
def a_backward_that_raised(run: Run) -> None:
    """An exception in the middle of backward, caught; gradients are dropped and the step is tried again."""
    model, optimizer = started(run)
    key = id(run)
    handle = run.unwrap(model).norm.register_forward_pre_hook(lambda _, args: (RaisesOnce.apply(args[0], key),))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        try:
            run.backward(loss)
        except FloatingPointError:
            optimizer.zero_grad()
            loss = loss_of(model, run.batch(step))
            run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    handle.remove()


@loop
def folds(run: Run) -> None:
    """Cross-validation: the model is built anew, in one process."""
    for fold in range(2):
        torch.manual_seed(fold)
        model, optimizer = started(run)
        _train(run, model, optimizer, 10 * fold)
        evaluate(run, model)
        if fold == 0:
            run.free()


@loop
def zero_grad_at_the_start(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        optimizer.zero_grad()
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        optimizer.step()
        run.see_mean(loss)


@loop
def zero_grad_of_the_model(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        model.zero_grad()
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        optimizer.step()
        run.see_mean(loss)


@loop
def parameters_of_a_copy_before(run: Run) -> None:
    """A copy that was made before prepare is no part of it."""
    model = Net()
    twin = copy.deepcopy(model)
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        loss = (model(run.batch(step)) - twin(run.batch(step))).pow(2).mean() + loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
