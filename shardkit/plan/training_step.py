"""One training step of a model parallelized by the runtime, with memory tracked at every moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardkit.config.schema import Config
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.process import Process
from shardkit.errors import ModelError
from shardkit.optim.plain_step import Stepper
from shardkit.optim.stepping import stepper_of
from shardkit.plan.averages import Ema
from shardkit.plan.batches import LossFunction
from shardkit.plan.memory_tracker import MemoryTracker
from shardkit.plan.simulated_optimizers import OptimizerFactory
from shardkit.sharding import precision
from shardkit.sharding.gradient_sync import deferred
from shardkit.sharding.hooks import is_in_backward, mark_own
from shardkit.sharding.parallelize import parallelize
from shardkit.sharding.units import blocks_of


def tracked_step(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh | None,
    process: Process,
    make_optimizers: OptimizerFactory,
    loss: LossFunction,
    has_buckets: bool,
    stateless: Collection[str] = (),
    ema: Ema = Ema.NO,
) -> tuple[MemoryTracker, tuple[str, ...]]:
    """(tracker, unused) after one steady-state step with optimizer state; `moments` are those of the last micro-batch.
    `unused`: names of trained parameters without a gradient. Optimizers create no state for these, so the caller tracks
    the step again with them in `stateless`.
    """
    precision.autocast_forward(model, config, process.device)
    parallel = parallelize(model, config, mesh, process)
    trained = {name: p for name, p in nn.Module.named_parameters(parallel) if p.requires_grad}
    if not trained:
        raise ModelError("model: no parameter is trained; set requires_grad on some.")
    optimizers = make_optimizers(trained)
    steppers = [stepper_of(optimizer) for optimizer in optimizers]
    tracker = MemoryTracker(is_on_host=config.use_cpu)
    with tracker:
        _make_states(steppers, [p for name, p in trained.items() if name not in stateless], tracker)
        averages = _averages(parallel, ema)
        tracker.count([*every_parameter(parallel), *parallel.buffers(), *averages], "parameters")
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        tracker.count((value for state in states for value in state.values()), "optimizer_state")
        del states
        if config.mode != "fsdp":
            _hold_gradients([*trained.values()], tracker, has_buckets, config.shardkit.ddp.comm_hook == "power_sgd")
        _mark(parallel, config, tracker)
        unused = _run(parallel, steppers, config, loss, tracker)
    del averages
    return tracker, unused


def tracked_forward(model: nn.Module, blocks: dict[str, nn.Module], loss: LossFunction) -> MemoryTracker:
    """The tracker after forward and loss of a model as it is; `moments` are those of the given blocks, by name."""
    tracker = MemoryTracker()
    _mark_forward(blocks, tracker, set())
    with tracker:
        tracker.count([*every_parameter(model), *model.buffers()], "parameters")
        tracker.enter("forward", "the root")
        held = loss(model)
        tracker.enter("end")
    del held
    return tracker


def _averages(model: nn.Module, ema: Ema) -> list[torch.Tensor]:
    """The averages that the script keeps; they are updated in place."""
    match ema:
        case Ema.NO:
            return []
        case Ema.TRAINED:
            trained = [p for p in every_parameter(model) if p.requires_grad]
            return [_copied(p, torch.promote_types(p.dtype, torch.float32)) for p in trained]
        case Ema.MODEL:
            return [_copied(tensor, tensor.dtype) for tensor in [*every_parameter(model), *model.buffers()]]


def _copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to(dtype, copy=True)


def _make_states(steppers: list[Stepper], parameters: list[nn.Parameter], tracker: MemoryTracker) -> None:
    """Creates the optimizers' state, as it exists from the second step on."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    _step(steppers, tracker)
    _drop_gradients(parameters)


def _step(steppers: list[Stepper], tracker: MemoryTracker) -> None:
    with tracker.in_optimizer():
        for stepper in steppers:
            stepper.step()


def _drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _run(
    model: nn.Module,
    steppers: list[Stepper],
    config: Config,
    loss: LossFunction,
    tracker: MemoryTracker,
) -> tuple[str, ...]:
    """Runs the step and returns the names of trained parameters without a gradient. Two micro-batches are enough for
    any larger number: only the gradients of earlier ones matter."""
    steps = config.shardkit.gradient_accumulation_steps
    earlier: dict[str, int] = {}
    for is_last in (False, True) if steps > 1 else (True,):
        tracker.restart()
        with ExitStack() as stack:
            if not is_last:
                stack.enter_context(deferred(model))
            tracker.enter("forward", "the root")
            output, value = loss(model)
            tracker.enter("backward", "the loss")
            value.backward()
        if not is_last:
            earlier = {kind: size * (steps - 1) for kind, size in tracker.payload_bytes.items()}
    for kind, size in earlier.items():
        tracker.payload_bytes[kind] = tracker.payload_bytes.get(kind, 0) + size
    unused = tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    tracker.enter("optimizer")
    _step(steppers, tracker)
    tracker.enter("end")
    _drop_gradients(every_parameter(model))
    del output, value
    return unused


def _hold_gradients(trained: list[nn.Parameter], tracker: MemoryTracker, has_buckets: bool, keeps_errors: bool) -> None:
    """Counts unsharded gradients. DDP's are views of its buckets, which exist from the start: each new gradient is
    copied into its bucket and freed (`gradient_as_bucket_view`). power_sgd also keeps the errors of its
    approximation."""
    buckets = {id(p): torch.empty_like(p, requires_grad=False) for p in trained} if has_buckets else {}
    errors = [torch.empty_like(bucket) for bucket in buckets.values()] if keeps_errors else []
    tracker.count(buckets.values(), "gradients")
    tracker.count(errors, "reduction")

    def arrived(parameter: torch.Tensor, held: object = errors) -> None:
        bucket, gradient = buckets.get(id(parameter)), parameter.grad
        if bucket is not None and gradient is not None and gradient is not bucket:
            parameter.grad = bucket.copy_(gradient)
        tracker.count([parameter.grad], "gradients")

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(mark_own(arrived))


def _mark(model: nn.Module, config: Config, tracker: MemoryTracker) -> None:
    """Adds hooks to the units (without FSDP, the blocks) that mark the start of their forward and backward."""
    modules = dict(model.named_modules())
    marks = _units(modules) or _blocks(model, config, modules)
    waiting: set[object] = set()
    _mark_forward(marks, tracker, waiting)
    model.register_forward_hook(lambda *_: tracker.enter("loss"))
    if config.mode == "fsdp":
        seen: dict[int, nn.Parameter] = {id(p): p for p in every_parameter(model)}
        for fqn, module in modules.items():
            if module._parameters:
                in_root = not any(fqn == mark or fqn.startswith(f"{mark}.") for mark in marks)
                module.register_forward_pre_hook(_on_gathered(seen, in_root, waiting, tracker))
        for parameter in seen.values():  # replicated parameters
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.count([p.grad], "gradients"))


def _mark_forward(marks: dict[str, nn.Module], tracker: MemoryTracker, waiting: set[object]) -> None:
    for fqn, module in marks.items():
        module.register_forward_pre_hook(_on_forward(fqn, tracker), prepend=True)
        module.register_forward_hook(_on_output(fqn, tracker, waiting), prepend=True)
        module.register_forward_hook(lambda *_: _pass(tracker))


def _units(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {fqn: module for fqn, module in modules.items() if fqn and isinstance(module, FSDPModule)}


def _blocks(model: nn.Module, config: Config, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    try:
        found = {id(block) for block in blocks_of(model, config.fsdp)}
    except ModelError:
        return {}
    return {fqn: module for fqn, module in modules.items() if id(module) in found}


def _on_forward(fqn: str, tracker: MemoryTracker) -> Callable[..., None]:
    """A forward inside backward is recomputation."""

    def hook(*_: Any) -> None:
        tracker.enter("backward" if is_in_backward() else "forward", fqn)

    return hook


def _pass(tracker: MemoryTracker) -> None:
    if not is_in_backward():
        tracker.enter("forward", "the root", is_passing=True)


def _on_output(fqn: str, tracker: MemoryTracker, waiting: set[object]) -> Callable[..., None]:
    """Backward of a unit starts with the gradient of one of its outputs. `waiting`: calls without one so far."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not tensors or is_in_backward():
            return
        call = object()
        waiting.add(call)

        def begin(_: torch.Tensor) -> None:
            if call in waiting:
                waiting.remove(call)
                tracker.enter("backward", fqn)

        for tensor in tensors:
            tensor.register_hook(begin)

    return hook


def _on_gathered(
    seen: dict[int, nn.Parameter], in_root: bool, waiting: set[object], tracker: MemoryTracker
) -> Callable[..., None]:
    """In forward a module has its gathered parameters; their gradients are unsharded until they are reduced."""

    def arrived(parameter: torch.Tensor) -> None:
        tracker.count([parameter.grad], "reduction")
        if in_root and not waiting and tracker.unit != "the root":
            tracker.enter("backward", "the root")

    def hook(module: nn.Module, _args: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen[id(parameter)] = parameter
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(arrived)

    return hook
