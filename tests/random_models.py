"""Random models, optimizers, loops and strategies, each drawn from a seed: on ranks as in plain torch on one process.

    python -m tests.random_models 0 300    # these seeds, on two ranks; prints what differs

All is computed in fp64, so that what differs is no rounding, also where Muon rounds to bf16.
"""

from __future__ import annotations

import copy
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from shardkit import Accelerator
from shardkit.distributed.collectives import broadcast_object_list
from tests.loops.net import cross_entropy
from tests.loops.run import WORDS, Loop, RanksRun, Run, config_of, numbers, whole
from tests.ranks import Pool, RankError

BOUND = 2e-5

# ---- blocks: (samples, words, width) -> the same shape ----


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        return x + torch.tanh(self.linear(self.norm(x)))


class Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.mT).mT + x


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True))


class Experts(nn.Module):
    """Every sample uses every expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        return x + sum(shares[..., i, None] * torch.tanh(one(x)) for i, one in enumerate(self.experts))


class Frozen(Normed):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.requires_grad_(False)


class WeightNormed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x


class Counting(Normed):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return x + super().forward(x) / (1 + self.calls)


class Checkpointed(Normed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Dropped(Counting):
    """Left out of every third forward, on all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return x if self.training and self.calls % 3 == 0 else Normed.forward(self, x)


class Twice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Normed(width)
        self.again = self.inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.inner(x))


class Listed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(2))
        self.by_name = nn.ParameterDict({"bias": nn.Parameter(torch.randn(1, width))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0].exp() + torch.sin(x * self.scales[1]) + self.by_name["bias"]


class Small(nn.Module):
    """Parameters of no dim, of one element, and of a leading dim of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.row = nn.Parameter(torch.randn(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.shift * torch.tanh(x * self.row)


class OwnParameters(Normed):
    def parameters(self) -> Any:  # without torch's argument
        yield from super().parameters()


class Adapted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.up(self.down(x))


@dataclass
class Output:
    x: torch.Tensor
    other: Any = None


class Named(NamedTuple):
    x: torch.Tensor
    other: Any = None


class _Odd(Normed):
    """It returns no tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))

    def wrap(self, x: torch.Tensor) -> Any:
        raise NotImplementedError


class ReturnsDataclass(_Odd):
    def wrap(self, x: torch.Tensor) -> Any:
        return Output(x)


class ReturnsDict(_Odd):
    def wrap(self, x: torch.Tensor) -> Any:
        return {"x": x, "other": None}


class ReturnsTuple(_Odd):
    def wrap(self, x: torch.Tensor) -> Any:
        return x, x.detach()


class ReturnsNamed(_Odd):
    def wrap(self, x: torch.Tensor) -> Any:
        return Named(x, x.mean())


class ReturnsDistribution(_Odd):
    def wrap(self, x: torch.Tensor) -> Any:
        return Independent(Normal(x, 1.0), 1)


BLOCKS: list[type[nn.Module]] = [
    *(Normed, Convolved, Attention, Experts, Frozen, WeightNormed, Counting, Checkpointed, Dropped, Twice, Listed),
    *(Small, OwnParameters, Adapted, ReturnsDataclass, ReturnsDict, ReturnsTuple, ReturnsNamed, ReturnsDistribution),
]


def _tensor(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["x"]
    if isinstance(output, Independent):
        return output.mean
    return output.x if isinstance(output, (Output, Named)) else output[0] if isinstance(output, tuple) else output


class Model(nn.Module):
    """Tokens (samples, 6) -> their loss."""

    def __init__(self, kinds: list[type[nn.Module]], width: int, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(kind(width) for kind in kinds)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = _tensor(block(x))
        return cross_entropy(self.head(self.norm(x)), tokens)


# ---- what is drawn ----

_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
_ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)


def _in_groups(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    decayed = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-2}]
    return [_ADAM([group for group in groups if group["params"]])]


def _with_muon(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, others = [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), *([_SGD(others)] if others else [])]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "sgd": lambda parameters: [_SGD(parameters)],
    "adamw": lambda parameters: [_ADAM(parameters)],
    "adagrad": lambda parameters: [torch.optim.Adagrad(parameters, lr=0.05)],
    "groups": _in_groups,
    "muon": _with_muon,
    "adafactor": lambda parameters: [torch.optim.Adafactor(parameters, lr=1e-2)],
}


class Drawn:
    """All that a seed decides."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.kinds = draw.choices(BLOCKS, k=draw.randint(1, 4))
        self.width, self.is_tied = draw.choice([6, 7, 8]), draw.random() < 0.5
        self.optimizer = draw.choice(list(OPTIMIZERS))
        self.strategy = draw.choice([1, 1, 2, 3])
        names = sorted({kind.__name__ for kind in self.kinds})
        self.fsdp = draw.choice(
            [
                {"fsdp_auto_wrap_policy": "NO_WRAP"},
                {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": draw.choice([20, 60, 200])},
                *[{"fsdp_transformer_layer_cls_to_wrap": draw.sample(names, draw.randint(1, len(names)))}] * 3,
            ]
        )
        self.accumulation = draw.randint(1, 3)
        self.clips, self.evaluates, self.averages = (draw.random() < 0.5 for _ in range(3))
        self.frozen_at = draw.choice([None, None, 1, 2])
        self.frozen = draw.randrange(len(self.kinds))
        self.changes_gradients, self.penalizes, self.looks_ahead = (draw.random() < 0.25 for _ in range(3))
        self.penalizes &= self.strategy != 3 or Dropped not in self.kinds  # torch's DDP refuses what forward left out
        self.recomputes = "fsdp_transformer_layer_cls_to_wrap" in self.fsdp and draw.random() < 0.3
        self.saved_at = draw.choice([None, None, 1, 2])

    def __str__(self) -> str:
        values = {**vars(self), "kinds": [kind.__name__ for kind in self.kinds]}
        return ", ".join(f"{name} {value}" for name, value in values.items())

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model(self.kinds, self.width, self.is_tied).double()

    def loop(self) -> Loop:
        unused = {"ddp_find_unused_parameters": True} if self.strategy == 3 and Dropped in self.kinds else {}
        recomputed = {"fsdp_activation_checkpointing": True} if self.recomputes else {}
        return Loop(partial(_train, self), self.accumulation, {**self.fsdp, **recomputed}, unused, bound=BOUND)


# ---- the loop ----


def _train(drawn: Drawn, run: Run) -> None:
    model = drawn.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, *optimizers = run.prepare(model, *OPTIMIZERS[drawn.optimizer](trained))
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        if step == drawn.frozen_at:
            run.unwrap(model).blocks[drawn.frozen].requires_grad_(False)
        for micro in range(drawn.accumulation):
            with run.accumulate(model):
                if drawn.looks_ahead:
                    with torch.no_grad():
                        run.see_mean(model(run.batch(300 + step)))
                loss = model(run.batch(10 * step + micro))
                if drawn.penalizes:
                    loss = loss + 1e-2 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)
                run.backward(loss)
                if not drawn.penalizes:
                    run.see_mean(loss)
                if drawn.changes_gradients and run.is_step:
                    for p in model.parameters():
                        if p.grad is not None:
                            p.grad.add_(p.detach(), alpha=0.01)
                if drawn.clips and run.is_step:
                    run.clip(model.parameters(), 0.5)
                run.step(*optimizers)
        if drawn.averages:
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p.detach(), 0.2)
        if drawn.evaluates and step % 2 == 0:
            model.eval()
            with torch.no_grad():
                run.see_mean(model(run.batch(777)))
            model.train()
        if step == drawn.saved_at:
            _go_back(run, model, optimizers)
    if drawn.averages:
        for mean in average:
            run.see(whole(mean).square().sum())


def _go_back(run: Run, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Save, train one step more, and load."""

    def one_step() -> None:
        for micro in range(run.accumulation):
            with run.accumulate(model):
                run.backward(model(run.batch(500 + micro)))
                run.step(*optimizers)

    if isinstance(run, RanksRun):
        with tempfile.TemporaryDirectory() as own:
            (folder,) = broadcast_object_list([own])  # rank 0's, for all
            run.accelerator.save_state(folder)
            one_step()
            run.accelerator.load_state(folder)
            run.accelerator.wait_for_everyone()
        return
    state = copy.deepcopy([one.state_dict() for one in (model, *optimizers)])
    one_step()
    for one, values in zip((model, *optimizers), state, strict=True):
        one.load_state_dict(values)


def in_plain_torch(seed: int) -> tuple[list[float], dict[str, Any]]:
    drawn = Drawn(seed)
    run = Run(accumulation=drawn.accumulation)
    _train(drawn, run)
    return run.seen, numbers(run)


def on_ranks(seed: int) -> tuple[list[float], dict[str, Any]]:
    drawn = Drawn(seed)
    accelerator = Accelerator(config=config_of(drawn.strategy, drawn.loop()))
    run = RanksRun(accelerator=accelerator, accumulation=drawn.accumulation)
    _train(drawn, run)
    return run.seen, numbers(run)


def difference(found: Any, expected: Any) -> str:
    """What differs, in words; empty if nothing does."""
    (seen, weights), (seen_alone, weights_alone) = found, expected
    for number, (one, other) in enumerate(zip(seen, seen_alone, strict=True)):
        if not abs(one - other) < BOUND:
            return f"number {number} seen: {one}, not {other}"
    if weights.keys() != weights_alone.keys():
        return f"names of weights: {[*weights]}, not {[*weights_alone]}"
    names = [name for name, weight in weights_alone.items() if not abs(weights[name] - weight).max() < BOUND]
    return f"weights {names}" if names else ""


def main(first: int, last: int) -> None:
    pool = Pool()
    for seed in range(first, last):
        try:
            said = difference(pool.run(2, on_ranks, seed)[0], in_plain_torch(seed))
        except RankError as error:
            said = str(error).rstrip()[-1200:]
        if said:
            print(f"{Drawn(seed)}\n    {said}", flush=True)
    pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
