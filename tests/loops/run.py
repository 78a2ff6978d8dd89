"""What a loop is given: plain torch in one process, or an Accelerator on ranks; and how a loop is run on either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.errors import ShardkitError
from shardkit.sharding.fsdp.shard_model import can_reduce_unused

BATCH = 12  # samples of a global batch: 1, 2, 3 and 4 ranks divide it
WORDS = 11

Function = Callable[["Run"], Any]


@dataclass(frozen=True)
class Loop:
    """One loop of the matrix."""

    function: Function
    accumulation: int = 1
    fsdp: Mapping[str, Any] = field(default_factory=lambda: {"fsdp_transformer_layer_cls_to_wrap": "Part"})
    shardkit: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[int | str, str] = field(default_factory=dict)
    """What the error says, of the strategies, or the device "xla", that refuse this loop on several ranks."""
    refused_alone: bool = False
    """Whether they refuse it on one rank too."""
    bound: float = 3e-5
    is_for_shards: bool = False
    """Whether it is that of one process under sharded strategies only, as documented."""
    is_long_run_only: bool = False
    """Whether only `make test-loops` runs it, on two ranks too."""

    def refusal(self, strategy: int, device: str) -> str | None:
        """What the error says where the loop is refused here; None where it runs. On XLA devices tensors are whole, as
        under strategy 3."""
        if device == "xla":
            alone = self.refused.get(3) if self.refused_alone else None
            return self.refused.get("xla", alone)
        if self.shardkit.get("ddp_find_unused_parameters") and strategy != 3 and not can_reduce_unused():
            return "FSDP supports it since torch 2.13"
        return self.refused.get(strategy) if _world() > 1 or self.refused_alone else None


LOOPS: dict[str, Loop] = {}

BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 30}
WHOLE = {"fsdp_auto_wrap_policy": "NO_WRAP"}


def loop(name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
    """One more loop of the matrix."""

    def add(function: Function) -> Function:
        LOOPS[name or function.__name__] = Loop(function, **settings)
        return function

    return add


@dataclass
class Run:
    """Plain torch in one process: nothing is prepared, and every batch is the global one."""

    steps: int = 4
    accumulation: int = 1
    seen: list[float] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    micro: int = 0
    is_plain: bool = True

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def prepare(self, *objects: Any) -> Any:
        self.models += [one for one in objects if isinstance(one, nn.Module)]
        return objects[0] if len(objects) == 1 else objects

    def batch(self, number: int, size: int = BATCH) -> torch.Tensor:
        """This process's part of a global batch of tokens (samples, 6)."""
        return self.part(torch.randint(0, WORDS, (size, 6), generator=torch.Generator().manual_seed(number)))

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def draw(self, number: int, *shape: int) -> torch.Tensor:
        """This process's part of a global batch of numbers (samples, *shape)."""
        return self.part(torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(number)))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The global batch of what this process has a part of, with gradients."""
        return part

    def loader(self, samples: int, size: int = BATCH) -> Any:
        data = torch.randint(0, WORDS, (samples, 6), generator=torch.Generator().manual_seed(99))
        return DataLoader(data, batch_size=size)

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        (loss / self.accumulation).backward(**arguments)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch; `is_step` says whether it is its window's last."""
        self.micro += 1
        yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

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

    def register(self, module: nn.Module, method: str) -> None:
        """A method, beside forward, that uses parameters."""

    def free(self) -> None:
        self.models.clear()

    def start_again(self) -> None:
        """Another Accelerator, as where a function that makes its own is called twice."""
        self.models.clear()

    def weights(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{fqn}": whole(t) for i, model in enumerate(self.models) for fqn, t in named(self.unwrap(model))}


@dataclass
class RanksRun(Run):
    """The same on ranks, by an Accelerator."""

    accelerator: Any = None
    is_plain: bool = False

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def prepare(self, *objects: Any) -> Any:
        prepared = self.accelerator.prepare(*objects)
        several = prepared if isinstance(prepared, tuple) else (prepared,)
        self.models += [one for one in several if isinstance(one, nn.Module)]
        return prepared

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.accelerator.num_processes)[self.accelerator.process_index].to(self.device)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return self.accelerator.gather_with_gradients(part)

    def loader(self, samples: int, size: int = BATCH) -> Any:
        return super().loader(samples, size // self.accelerator.num_processes)

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        self.accelerator.backward(loss, **arguments)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        self.micro += 1
        with self.accelerator.accumulate(*models):
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(model)

    def unsharded(self, model: nn.Module) -> AbstractContextManager[None]:
        return self.accelerator.unsharded(model)

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

    def register(self, module: nn.Module, method: str) -> None:
        self.accelerator.register_forward_method(module, method)

    def free(self) -> None:
        super().free()
        self.accelerator.free_memory()

    def start_again(self) -> None:
        super().start_again()
        self.accelerator = Accelerator(config=self.accelerator.config)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()


def plain(name: str) -> tuple[list[float], dict[str, Any]]:
    """What a loop sees and ends with in plain torch."""
    one = LOOPS[name]
    run = Run(accumulation=one.accumulation)
    torch.manual_seed(0)
    one.function(run)
    return run.seen, numbers(run)


def on_ranks(name: str, strategies: tuple[int, ...], device: str = "cpu", **fsdp: Any) -> dict[int, Any]:
    """The same by an Accelerator, for each strategy: runs on every rank. What is rightly refused is its text."""
    one, found = LOOPS[name], {}
    for strategy in strategies:
        accelerator = Accelerator(config=config_of(strategy, one, device, **fsdp))
        run = RanksRun(accelerator=accelerator, accumulation=one.accumulation)
        torch.manual_seed(0)
        found[strategy] = _result(one, run, one.refusal(strategy, device))
        accelerator.free_memory()
    return found


def _result(one: Loop, run: Run, refusal: str | None) -> Any:
    try:
        one.function(run)
    except (ShardkitError, RuntimeError) as error:
        if refusal is not None and refusal in str(error):
            return str(error)
        raise
    assert refusal is None, f"not refused: {refusal}"
    return run.seen, numbers(run)


def numbers(run: Run) -> dict[str, Any]:
    def as_double(tensor: torch.Tensor) -> Any:
        return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().cpu().numpy().copy()

    return {name: as_double(tensor) for name, tensor in run.weights().items()}


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def config_of(strategy: int, one: Loop, device: str = "cpu", **fsdp: Any) -> Config:
    """Small units; hybrid strategies on four ranks are 2 x 2, else each rank is a replica. On XLA devices one process
    drives four."""
    world = 4 if device == "xla" else _world()
    sizes = {"replicate_size": 2, "shard_size": 2} if world == 4 else {"replicate_size": world, "shard_size": 1}
    return Config(
        **({"distributed_type": "XLA", "xla": True} if device == "xla" else {}),
        use_cpu=device in ("cpu", "xla"),
        num_processes=world,
        fsdp_config={"fsdp_sharding_strategy": strategy, **one.fsdp, **fsdp},
        shardkit={
            "gradient_accumulation_steps": one.accumulation,
            **({"mesh": sizes} if strategy in (4, 5) else {}),
            **one.shardkit,
        },
    )
