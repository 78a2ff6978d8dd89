"""One process of `benchmarks.gpu`: trains a GPT on the device in one way, and leaves what it measured.

    python -m benchmarks.gpu_rank ORDER.json RESULT.json

A process of its own for each measurement: nothing of one contestant's memory or compiled code is there for the next.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from benchmarks.contestants import Task, loss_of

# What makes the host wait for the device, by its name in a profile.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")


@dataclass(frozen=True)
class Order(Task):
    """What is trained, in which way, and what is measured: steps, waits or checkpoint. `filled`: weights of one value,
    where only memory counts."""

    task: str
    contestant: str
    steps: int
    strategy: int = 1
    precision: str = "bf16"
    optimizer: str = "AdamW"
    compiled: bool = False
    offloaded: bool = False
    offloads_state: bool = False
    checkpointing: bool = False
    filled: bool = False
    warm_up: int = 3


@dataclass
class Training:
    """A contestant, set up."""

    step: Callable[[torch.Tensor], None]
    model: nn.Module
    save: Callable[[str, bool], Any] = lambda folder, blocking: None
    load: Callable[[str], Any] = lambda folder: None
    end: Callable[[], Any] = lambda: None


def main() -> None:
    """Measure what the order asks for."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text()))
    training = CONTESTANTS[order.contestant](order)
    result = TASKS[order.task](order, training)
    training.end()
    Path(sys.argv[2]).write_text(json.dumps({"order": asdict(order), **result}))


# ---- contestants ----


def by_hand(order: Order) -> Training:
    """FSDP2 as its tutorial has it, in the dtypes that shardkit uses."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if order.device == "cuda" else "gloo", **_alone())
    mesh = init_device_mesh(order.device, (1,))
    compute = None if order.precision == "no" else torch.bfloat16
    inner = MixedPrecisionPolicy(compute, torch.float32)
    outer = MixedPrecisionPolicy(compute, torch.float32, output_dtype=torch.float32)
    model = _model(order)
    kept = CPUOffloadPolicy() if order.offloaded else OffloadPolicy()
    for block in model.blocks:
        if order.precision == "fp8":
            _convert_to_fp8(block)
        if order.compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=inner, offload_policy=kept, reshard_after_forward=order.strategy == 1)
    fully_shard(model, mesh=mesh, mp_policy=outer, offload_policy=kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        logits = model(tokens)  # held until the end of the step, as in most loops, and as the plan takes for granted
        loss_of(logits, tokens).backward()
        optimizer.step()
        if order.precision == "fp8":
            import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()

    return Training(step, model, end=dist.destroy_process_group)


def _convert_to_fp8(block: nn.Module) -> None:
    """As torchao's documentation has it for FSDP2."""
    float8 = import_module("torchao.float8")
    float8.convert_to_float8_training(block, config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def _model(order: Order) -> nn.Module:
    """The model, built where it is to live: billions of random numbers take a CPU minutes."""
    place = "cpu" if order.offloaded else order.device
    with torch.device("meta" if order.filled else place):
        model = order.model()
    if order.filled:
        model = model.to_empty(device=place)
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(0.01)
    return model


def _alone() -> dict[str, Any]:
    return {"store": dist.HashStore(), "rank": 0, "world_size": 1}


def with_shardkit(order: Order) -> Training:
    """shardkit by its public face, with the optimizer as torch makes it."""
    from shardkit import Accelerator

    fsdp = {
        "fsdp_sharding_strategy": order.strategy,
        "fsdp_offload_params": order.offloaded,
        "fsdp_activation_checkpointing": order.checkpointing,
    }
    return _accelerated(
        order,
        Accelerator(
            config={
                "distributed_type": "FSDP",
                "num_processes": 1,
                "use_cpu": order.device == "cpu",
                "mixed_precision": order.precision,
                "fsdp_config": fsdp,
                "shardkit": {"compile": order.compiled, "offload_optimizer": order.offloads_state},
            }
        ),
    )


def with_accelerate(order: Order) -> Training:
    """accelerate with its FSDP2 plugin, which it ignores in a process without a launcher's variables."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=order.strategy == 1,
        cpu_offload=order.offloaded,
        activation_checkpointing=order.checkpointing,
    )
    dist.init_process_group("cpu:gloo,cuda:nccl", **_alone())
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=order.precision)
    if accelerator.distributed_type is not DistributedType.FSDP:
        raise RuntimeError(f"accelerate does not shard here (got {accelerator.distributed_type})")
    return _accelerated(order, accelerator, compiles=order.compiled)


def _accelerated(order: Order, accelerator: Any, compiles: bool = False) -> Training:
    """The loop of both Accelerators. `compiles`: by hand; shardkit does it by a setting."""
    model = _model(order)
    for block in model.blocks if compiles else ():
        block.compile()
    optimizer = getattr(torch.optim, order.optimizer)(model.parameters(), lr=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(tokens: torch.Tensor) -> None:
        logits = model(tokens)
        accelerator.backward(loss_of(logits, tokens))
        optimizer.step()
        optimizer.zero_grad()

    def save(folder: str, blocking: bool) -> None:
        accelerator.save_state(folder, blocking=blocking)

    return Training(step, model, save, accelerator.load_state, accelerator.end_training)


CONTESTANTS = {"by hand": by_hand, "shardkit": with_shardkit, "accelerate": with_accelerate}


# ---- what is measured ----


def measure_steps(order: Order, training: Training) -> dict[str, Any]:
    """Seconds a step, and what the device's allocator took at most; on the CPU no memory."""
    _train(order, training, order.warm_up)
    if order.device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    began = time.perf_counter()
    _train(order, training, order.steps)
    result: dict[str, Any] = {"step_s": (time.perf_counter() - began) / order.steps}
    result["parameters"] = sum(parameter.numel() for parameter in training.model.parameters())
    if order.device != "cpu":
        result["allocated_bytes"] = torch.accelerator.max_memory_allocated()
        result["reserved_bytes"] = torch.accelerator.max_memory_reserved()
        result["device_name"] = torch.get_device_module(order.device).get_device_name()
    return result


def count_waits(order: Order, training: Training) -> dict[str, Any]:
    """How often a step makes the host wait for the device, by the profiler's names."""
    from torch.profiler import ProfilerActivity, profile

    _train(order, training, order.warm_up)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if order.device == "cuda" else [])]
    tokens = _tokens(order)
    with profile(activities=kinds) as found:
        for _ in range(order.steps):
            training.step(tokens)
    names = [event.name for event in found.events()]
    if order.device == "cuda" and not any(name.startswith("cuda") for name in names):
        raise RuntimeError("the profiler saw no call of CUDA, so that it counts no waits (does CUPTI work here?)")
    counts = Counter(names)
    return {"waits": {name: counts[name] / order.steps for name in WAITS}}


def measure_checkpoint(order: Order, training: Training) -> dict[str, Any]:
    """Seconds of a save, a load, and of what the loop waits for a save beside training; and the bytes of the state."""
    _train(order, training, order.warm_up)
    folder = Path(sys.argv[2]).parent
    result = {"save_s": _seconds(order, lambda: training.save(str(folder / "blocking"), True))}
    result["load_s"] = _seconds(order, lambda: training.load(str(folder / "blocking")))  # later it waits for a save
    result["async_wait_s"] = _seconds(order, lambda: training.save(str(folder / "beside"), False))
    result["step_beside_s"] = _seconds(order, lambda: _train(order, training, 1))
    size = sum(path.stat().st_size for path in (folder / "blocking").rglob("*") if path.is_file())
    return {**result, "bytes": size}


TASKS = {"steps": measure_steps, "waits": count_waits, "checkpoint": measure_checkpoint}


def _train(order: Order, training: Training, steps: int) -> None:
    tokens = _tokens(order)
    for _ in range(steps):
        training.step(tokens)
    _synchronize(order)


def _tokens(order: Order) -> torch.Tensor:
    chosen = torch.Generator().manual_seed(0)
    return torch.randint(order.vocab, (order.batch, order.seq), generator=chosen).to(order.device)


def _seconds(order: Order, act: Callable[[], Any]) -> float:
    _synchronize(order)
    began = time.perf_counter()
    act()
    _synchronize(order)
    return time.perf_counter() - began


def _synchronize(order: Order) -> None:
    if order.device != "cpu":
        torch.accelerator.synchronize()


if __name__ == "__main__":
    main()
