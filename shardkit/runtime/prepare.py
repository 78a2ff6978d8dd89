"""`prepare`: models are parallelized, optimizers rebound to their parameters, loaders split over ranks."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from shardkit.config.meaning import offloads_state
from shardkit.data.agreement import generator_of
from shardkit.data.loader import PreparedLoader
from shardkit.data.loop import Call
from shardkit.data.preparing import prepare_loader
from shardkit.distributed import accelerators
from shardkit.distributed.host_memory import keep_state_there
from shardkit.distributed.modules import every_parameter, layers, unwrapped
from shardkit.distributed.tensors import is_composed, is_dtensor
from shardkit.errors import ShardkitError, UsageError
from shardkit.log import get_logger
from shardkit.optim import rebind
from shardkit.optim.kernels import parameters_of
from shardkit.runtime import distributed_model
from shardkit.runtime.likely_mistakes.shared_parameters import refuse_shared
from shardkit.runtime.lr_scheduler import AcceleratedScheduler
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.run import OfModel, Run, Taken
from shardkit.sharding.ddp.names import take_names_of_replicas
from shardkit.wording import first_few

log = get_logger(__name__)

Kind = Literal["model", "optimizer", "loader", "scheduler", "nothing"]


def prepare(
    run: Run,
    objects: Sequence[Any],
    weights: str | Path | None = None,
    device_placement: Sequence[bool | None] | None = None,
) -> list[Any]:
    """The prepared objects, in the given order; `device_placement`: which of them are moved to the rank's device; None:
    as set in the run. Collective. Optimizers and schedulers that are refused are not among the run's afterwards.

    The work has a fixed order, so that the order of the arguments does not matter: models first, then loaders, then
    optimizers, which need the models' new parameters, then schedulers, which need optimizers.
    """
    objects = [_without_earlier_replica(run, one) for one in objects]
    kinds = _kinds(objects)
    moves = _placement(run, objects, device_placement)
    models = [one for one, kind in zip(objects, kinds, strict=True) if kind == "model"]
    refuse_shared(run, models)
    distributed_model.note_trees(run, [one for one in models if _prepared(run, one) is None])
    prepared, found_before = list(objects), ([*run.optimizers], [*run.schedulers])
    for kind, one in (
        ("model", lambda model, moves: _model(run, model, weights, moves)),
        ("loader", lambda loader, moves: _loader(run, loader, moves)),
        ("optimizer", lambda optimizer, _: _optimizer(run, optimizer)),
        ("scheduler", lambda scheduler, _: _scheduler(run, scheduler)),
    ):
        for position, found in enumerate(kinds):
            if found == kind:
                prepared[position] = one(objects[position], moves[position])
    try:
        _follow(run)
    except ShardkitError:
        run.optimizers[:], run.schedulers[:] = found_before
        raise
    triples = zip(objects, prepared, kinds, strict=True)
    loaders = [(before, after) for before, after, kind in triples if kind == "loader"]
    run.schedule_lengths.note_prepared(loaders, run.schedulers)
    if "model" in kinds and run.config.mode == "fsdp" and run.process.device.type != "cpu":
        accelerators.empty_cache()  # whole weights that sharding has freed, else reserved in segments of their sizes
    return prepared


def for_evaluation(run: Run, model: nn.Module, weights: str | Path | None, device_placement: bool | None) -> nn.Module:
    """The model for evaluation only: sharded under FSDP, never wrapped in DDP, and part of no checkpoint. `prepare`
    makes it trainable later. Collective."""
    if kind_of(model) != "model":
        raise UsageError(f"prepare_model: not a module (got {type(model).__name__}); give a torch.nn.Module.")
    model = _without_earlier_replica(run, model)
    if model in run.evaluated or _prepared(run, model) is not None:
        distributed_model.load(run, model, weights)
        return model
    if run.config.mode == "fsdp":
        refuse_shared(run, [model])
    (moves,) = _placement(run, [model], [device_placement])
    distributed_model.note_trees(run, [model])
    run.evaluated[model] = distributed_model.distributed(run, model, weights, moves)
    if run.config.mode == "ddp":
        take_names_of_replicas(model)
    return model


def kind_of(value: Any) -> Kind | None:
    """The kind of object that `prepare` takes the value for; None where it is unknown."""
    if value is None:
        return "nothing"
    if isinstance(value, type):  # has the methods of what it is a class of
        return None
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, (DataLoader, PreparedLoader)):
        return "loader"
    if hasattr(value, "zero_grad"):
        return None
    if all(hasattr(value, name) for name in ("step", "state_dict", "load_state_dict")):
        return "scheduler"
    return None


def known_optimizer(run: Run, optimizer: Any) -> AcceleratedOptimizer | None:
    """The prepared optimizer, also for the one inside; None if it was not prepared."""
    return next((known for known in run.optimizers if optimizer is known or optimizer is known.optimizer), None)


def _kinds(objects: Sequence[Any]) -> list[Kind]:
    kinds = [kind_of(value) for value in objects]
    problems = [
        f"prepare: argument {number} {_not_known(objects[number - 1])}"
        for number, kind in enumerate(kinds, 1)
        if kind is None
    ]
    if problems:
        raise UsageError("\n".join(problems))
    return [kind for kind in kinds if kind is not None]


def _not_known(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, type):
        return f"is a class (got {value.__name__}); give an object of it."
    if hasattr(value, "zero_grad"):
        return (
            f"has zero_grad() as optimizers have, but is no torch.optim.Optimizer (got {name}); derive it from that, "
            f"or prepare the optimizer inside, and create {name} around the prepared one."
        )
    return f"is neither model, optimizer, data loader nor scheduler (got {name}); leave it out."


def _placement(run: Run, objects: Sequence[Any], asked: Sequence[bool | None] | None) -> list[bool]:
    """Whether each of the objects is moved to the rank's device."""
    given = one_for_each(asked, len(objects))
    return [run.loops.device_placement if answer is None else answer for answer in given]


def one_for_each(asked: Sequence[bool | None] | None, number: int) -> Sequence[bool | None]:
    """The values of device_placement for so many objects. UsageError if it is not one for each."""
    if asked is None:
        return [None] * number
    if not isinstance(asked, (list, tuple)) or len(asked) != number:
        got = len(asked) if isinstance(asked, (list, tuple)) else repr(asked)
        raise UsageError(
            f"prepare(device_placement=...): needs one value per argument (got {got} for {number}); "
            "write a list of True, False or None for each."
        )
    return asked


def _model(run: Run, model: nn.Module, weights: str | Path | None, moves: bool) -> nn.Module:
    if (known := _prepared(run, model)) is not None:
        distributed_model.load(run, known, weights)
        return known
    from shardkit.sharding.ddp.replicate import replicate
    from shardkit.sharding.parallelize import at_end_of_backward

    names = run.evaluated.pop(model, None)
    if names is None:
        names = distributed_model.distributed(run, model, weights, moves)
    else:
        distributed_model.load(run, model, weights)
    _warn_of_composed(run, model)
    parallel = model if run.mesh is not None else replicate(model, run.config, run.process)
    if parallel not in run.watched:
        at_end_of_backward(parallel, partial(_note_backward, ref(run), ref(parallel)))
        run.watched.add(parallel)
    if run.nan_origin is not None:
        run.nan_origin.watch(unwrapped(parallel))
    vars(parallel)["_shardkit_run"] = OfModel(run)
    run.models.append(parallel)
    run.taken.append(Taken(parallel, names, {id(p) for p in every_parameter(parallel)}))
    return parallel


def _warn_of_composed(run: Run, model: nn.Module) -> None:
    """Tells before the training what a save would refuse."""
    composed = [name for name, one in (*model.named_parameters(), *model.named_buffers()) if is_composed(one)]
    if composed and run.process.is_main:
        log.warning(
            "checkpoint: quantized weights cannot be saved (got %s), so save_state will be refused unless a save hook "
            "saves this model; save its adapters by save_model.",
            first_few(composed, 3),
        )


def _note_backward(of_run: ReferenceType[Run], of_model: ReferenceType[nn.Module]) -> None:
    if (run := of_run()) is not None and (model := of_model()) is not None:
        run.accumulation.note_backward(model)


def _prepared(run: Run, model: nn.Module) -> nn.Module | None:
    """The model as `prepare` has returned it, also for a module in its wrappers; None if it was not prepared."""
    return next((one for one in run.models if any(model is inner for inner in layers(one))), None)


def _without_earlier_replica(run: Run, value: Any) -> Any:
    """The module in a model that was prepared for DDP by another Accelerator, or before `free_memory`; else the
    value."""
    if not isinstance(value, DistributedDataParallel) or _prepared(run, value) is not None:
        return value
    from shardkit.sharding.ddp.replica import Replica

    return value.module if isinstance(value, Replica) else value


def _loader(run: Run, loader: Any, moves: bool) -> PreparedLoader:
    process, data = run.process, run.config.shardkit.data
    generator = generator_of(loader) if isinstance(loader, DataLoader) else None
    beside = run.counters.loaders if generator is None else sum(known is generator for known in run.generators)
    prepared = prepare_loader(
        loader,
        process.rank // run.region.group.size,
        run.readers,
        process.device if moves else None,
        run.config.shardkit.seed if data.seed is None else data.seed,
        number=beside,
        split_batches=data.split_batches,
        even_batches=data.even_batches,
    )
    if prepared not in run.loaders:
        _drop_unused(run.loaders)
        prepared.before_loop = Call(run.accumulation.before_loop)
        prepared.after_batch = Call(run.accumulation.after_batch)
        run.loaders.append(prepared)
        if generator is None:
            run.counters.loaders += 1
        else:
            run.generators.append(generator)
    return prepared


def _drop_unused(loaders: list[PreparedLoader]) -> None:
    """Drops loaders that nobody else holds any more, as of a script that prepares one in each round: its data would
    stay in memory, and in checkpoints."""
    references = [ref(loader) for loader in loaders]
    loaders.clear()
    loaders += [loader for reference in references if (loader := reference()) is not None]


def _optimizer(run: Run, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer:
    if (known := known_optimizer(run, optimizer)) is not None:
        return known
    if isinstance(optimizer, AcceleratedOptimizer):  # prepared before free_memory
        optimizer = optimizer.optimizer
    keep_state_there(optimizer, offloads_state(run.config) and run.device.type != "cpu")
    prepared = AcceleratedOptimizer(optimizer, run.accumulation)
    run.optimizers.append(prepared)
    run.accumulation.note_optimizer()
    return prepared


def _scheduler(run: Run, scheduler: Any) -> AcceleratedScheduler:
    for known in run.schedulers:
        if scheduler is known or scheduler is known.scheduler:
            return known
    if isinstance(scheduler, AcceleratedScheduler):  # prepared before free_memory
        scheduler = scheduler.scheduler
    prepared = AcceleratedScheduler(
        scheduler, run.optimizers, run.accumulation, run.loops.step_scheduler_with_optimizer, run.mean_metric
    )
    run.schedulers.append(prepared)
    return prepared


def _follow(run: Run) -> None:
    """Rebinds every optimizer, also those of earlier calls, to the current parameters of its models."""
    if not run.models:
        return
    for optimizer in run.optimizers:
        for one in run.taken:
            rebind.rebind(optimizer.optimizer, one.names_before, one.model)
        _refuse_strangers(run, optimizer)
        optimizer.follow_parameters()


def watch_optimizers(run: Run) -> None:
    """Makes what `prepare` checks of an optimizer be checked also when it gets new parameters later, and before the
    first step of one that is not prepared."""
    run.events.on_new_group = partial(_follow, run)
    if run.config.num_processes > 1:
        run.events.on_foreign_optimizer = partial(_refuse_late, run)


def _refuse_strangers(run: Run, optimizer: AcceleratedOptimizer) -> None:
    """UsageError where an optimizer has parameters of no prepared model: their gradients would not be reduced, and
    ranks would diverge."""
    own = {id(parameter) for model in run.models for parameter in every_parameter(model)}
    _refuse_late(run, optimizer.optimizer)
    strangers = [parameter for parameter in optimizer.parameters if id(parameter) not in own]
    if not strangers:
        return
    got = f"got {len(strangers)} of {len(optimizer.parameters)}, the first of shape {tuple(strangers[0].shape)}"
    name = type(optimizer.optimizer).__name__
    if not all(any(id(parameter) in one.parameters for one in run.taken) for parameter in strangers):
        raise UsageError(
            f"prepare: {name} trains parameters of no prepared model ({got}); "
            "prepare the model before its optimizer, or in the same call; put a parameter without a module (SAC's "
            "log_alpha) into a module of its own whose forward uses it, and prepare that too."
        )
    again = "call accelerator.free_memory() and prepare the model with a new optimizer"
    if run.config.mode == "fsdp" and any(map(_added, run.taken)):
        again = "build a new model with the new modules, load these weights, and prepare it with a new optimizer"
    raise UsageError(
        f"prepare: {name} trains parameters that were removed from the model after it was prepared ({got}); "
        f"leave them out of the optimizer's param_groups, or {again}."
    )


def _added(taken: Taken) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of those that the model has got since it was prepared."""
    named = unwrapped(taken.model).named_parameters()
    # Sharded ones are FSDP's own, which it makes anew for load_state_dict(assign=True).
    return [(fqn, p) for fqn, p in named if id(p) not in taken.parameters and not is_dtensor(p)]


def _refuse_late(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """UsageError for parameters added to a model after it was prepared: their gradients would not be reduced."""
    chosen = {*map(id, parameters_of(optimizer))}
    late = [fqn for one in run.taken for fqn, parameter in _added(one) if id(parameter) in chosen]
    if late:
        raise UsageError(
            f"prepare: {type(optimizer).__name__} trains parameters that were added to the model after it "
            f"was prepared (got {', '.join(late[:3])}), and their gradients are not reduced over ranks; add modules "
            "to the model before prepare."
        )
