"""What `prepare` does: models are parallelized, optimizers follow their parameters, loaders give each rank its part."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakMethod

import torch
from torch import nn
from torch.utils.data import DataLoader

from shardkit.data.agreement import generator_of
from shardkit.data.loader import PreparedLoader, prepare_loader
from shardkit.distributed.tensors import unwrapped
from shardkit.errors import UsageError
from shardkit.optim import rebind
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.schedule import AcceleratedScheduler
from shardkit.sharding import precision
from shardkit.sharding.released import ReleasedParameter

if TYPE_CHECKING:
    from shardkit.runtime.accelerator import Accelerator

Kind = Literal["model", "optimizer", "loader", "scheduler", "nothing"]


def prepare(accelerator: "Accelerator", objects: Sequence[Any], weights: str | Path | None = None) -> list[Any]:
    """The objects ready for all ranks, in the given order. Collective.

    The order of work is fixed, so that the order of the arguments does not matter: models first, then optimizers,
    which need the models' new parameters, then schedulers, which belong to optimizers.
    """
    kinds = _kinds(objects)
    _refuse_shared(accelerator, [one for one, kind in zip(objects, kinds, strict=True) if kind == "model"])
    prepared = list(objects)
    for kind, one in (
        ("model", lambda model: _model(accelerator, model, weights)),
        ("loader", lambda loader: _loader(accelerator, loader)),
        ("optimizer", lambda optimizer: _optimizer(accelerator, optimizer)),
        ("scheduler", lambda scheduler: _scheduler(accelerator, scheduler)),
    ):
        for position, found in enumerate(kinds):
            if found == kind:
                prepared[position] = one(objects[position])
    _follow(accelerator)
    return prepared


def kind_of(value: Any) -> Kind | None:
    """What `prepare` takes the value for; None where it is nothing that it knows."""
    if value is None:
        return "nothing"
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, (DataLoader, PreparedLoader)):
        return "loader"
    if all(hasattr(value, name) for name in ("step", "state_dict", "load_state_dict")):
        return "scheduler"
    return None


def own_parameters(accelerator: "Accelerator", parameters: Any) -> list[torch.Tensor]:
    """The parameters as a list. Raises UsageError where they are not what the prepared models have now."""
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not accelerator.models or any(parameter.grad is not None for parameter in chosen):
        return chosen
    own = {id(parameter) for model in accelerator.models for parameter in model.parameters()}
    if any(id(parameter) in own for parameter in chosen):
        return chosen
    raise UsageError(
        f"clip: these are no parameters of a prepared model (got {len(chosen)}, taken before prepare?); "
        "take them from the prepared model: model.parameters()."
    )


def optimizers_of(accelerator: "Accelerator", parameters: Sequence[torch.Tensor]) -> list[AcceleratedOptimizer]:
    """The prepared optimizers that train any of the parameters."""
    if len(accelerator.optimizers) < 2:
        return accelerator.optimizers
    chosen = {id(parameter) for parameter in parameters}
    return [one for one in accelerator.optimizers if any(id(parameter) in chosen for parameter in one.parameters)]


def _kinds(objects: Sequence[Any]) -> list[Kind]:
    kinds = [kind_of(value) for value in objects]
    problems = [
        f"prepare: argument {number} is neither model, optimizer, data loader nor scheduler "
        f"(got {type(objects[number - 1]).__name__}); leave it out."
        for number, kind in enumerate(kinds, 1)
        if kind is None
    ]
    if problems:
        raise UsageError("\n".join(problems))
    return [kind for kind in kinds if kind is not None]


def _model(accelerator: "Accelerator", model: nn.Module, weights: str | Path | None) -> nn.Module:
    if any(model is known for known in accelerator.models):
        return model
    from shardkit.sharding.parallelize import at_end_of_backward, parallelize

    names = rebind.ParameterNames.of(model)
    path = None if weights is None else Path(weights)
    precision.autocast_forward(model, accelerator.config, accelerator.device)
    parallel = parallelize(model, accelerator.config, accelerator.mesh, accelerator.process, path)
    at_end_of_backward(parallel, accelerator.accumulation.note_backward)
    accelerator.models.append(parallel)
    accelerator.prepared_parameters.append((parallel, {id(p) for p in parallel.parameters()}))
    accelerator.names_before.append((names, parallel))
    return parallel


def _loader(accelerator: "Accelerator", loader: Any) -> PreparedLoader:
    process = accelerator.process
    beside = 0
    if isinstance(loader, DataLoader):
        beside = sum(generator_of(known) is generator_of(loader) for known in accelerator.loaders)
    prepared = prepare_loader(
        loader,
        process.rank,
        process.world_size,
        process.device,
        accelerator.config.shardkit.seed,
        number=beside,
        split_batches=accelerator.split_batches,
        even_batches=accelerator.even_batches,
    )
    if prepared not in accelerator.loaders:
        prepared.after_batch = WeakMethod(accelerator.accumulation.after_batch)
        accelerator.loaders.append(prepared)
    return prepared


def _optimizer(accelerator: "Accelerator", optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
    for known in accelerator.optimizers:
        if optimizer is known or optimizer is known.optimizer:
            return known
    prepared = AcceleratedOptimizer(optimizer, accelerator.accumulation)
    accelerator.optimizers.append(prepared)
    return prepared


def _scheduler(accelerator: "Accelerator", scheduler: Any) -> AcceleratedScheduler:
    for known in accelerator.schedulers:
        if scheduler is known or scheduler is known.scheduler:
            return known
    prepared = AcceleratedScheduler(
        scheduler, accelerator.optimizers, accelerator.accumulation, accelerator.step_scheduler_with_optimizer
    )
    accelerator.schedulers.append(prepared)
    return prepared


def _follow(accelerator: "Accelerator") -> None:
    """Every optimizer, also one prepared in an earlier call, works on what its models have now."""
    if not accelerator.models:
        return
    for optimizer in accelerator.optimizers:
        for names, model in accelerator.names_before:
            rebind.rebind(optimizer.optimizer, names, model)
        _refuse_strangers(accelerator, optimizer)
        optimizer.follow_parameters()


def _refuse_shared(accelerator: "Accelerator", models: Sequence[nn.Module]) -> None:
    """A parameter of two models would be sharded twice, or reduced twice."""
    if accelerator.config.num_processes == 1 and accelerator.config.mode != "fsdp":
        return
    seen = {id(p) for known in accelerator.models for p in known.parameters()}
    for model in models:
        if any(model is known for known in accelerator.models):
            continue
        own = dict(model.named_parameters())
        shared = [fqn for fqn, p in own.items() if id(p) in seen or isinstance(p, ReleasedParameter)]
        if shared:
            raise UsageError(
                f"prepare: two models share {', '.join(shared[:3])}, which can be sharded only once; put both "
                "into one module (such as nn.ModuleDict) and prepare that: its parts can be called by themselves."
            )
        seen |= {id(p) for p in own.values()}


def _refuse_strangers(accelerator: "Accelerator", optimizer: AcceleratedOptimizer) -> None:
    """A parameter of no prepared model would get each rank's own gradient, and ranks would drift apart silently."""
    own = {id(parameter) for model in accelerator.models for parameter in model.parameters()}
    _refuse_late(accelerator, optimizer)
    strangers = [parameter for parameter in optimizer.parameters if id(parameter) not in own]
    if strangers:
        raise UsageError(
            f"prepare: {type(optimizer.optimizer).__name__} trains parameters of no prepared model "
            f"(got {len(strangers)} of {len(optimizer.parameters)}, the first of shape {tuple(strangers[0].shape)}); "
            "prepare the model before its optimizer, or in the same call."
        )


def _refuse_late(accelerator: "Accelerator", optimizer: AcceleratedOptimizer) -> None:
    """Nobody reduces the gradients of a module that was put into a model after it was prepared."""
    chosen = {id(parameter) for parameter in optimizer.parameters}
    late = [
        fqn
        for model, known in accelerator.prepared_parameters
        for fqn, parameter in unwrapped(model).named_parameters()
        if id(parameter) in chosen and id(parameter) not in known
    ]
    if late:
        raise UsageError(
            f"prepare: {type(optimizer.optimizer).__name__} trains parameters that came into the model after it was "
            f"prepared (got {', '.join(late[:3])}), and ranks would not share their gradients; put modules into the "
            "model before prepare."
        )
