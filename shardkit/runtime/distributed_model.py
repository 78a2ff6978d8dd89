"""A model is sharded once, whatever prepares it again: the same run, or another Accelerator."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from shardkit.config.meaning import eight_bits
from shardkit.distributed.modules import unwrapped
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.model.live import tree_of
from shardkit.model.several import for_one_of
from shardkit.model.tree import ModuleNode
from shardkit.optim import rebind
from shardkit.runtime.checkpoints import save_pretrained
from shardkit.runtime.likely_mistakes import evaluations
from shardkit.runtime.run import Run
from shardkit.sharding import precision
from shardkit.sharding.context_parallel import forwards
from shardkit.wording import first_few

log = get_logger(__name__)


@dataclass(frozen=True)
class _Before:
    cut: Any
    names: rebind.ParameterNames
    tree: ModuleNode


_sharded_before: WeakKeyDictionary[nn.Module, _Before] = WeakKeyDictionary()
"""Of each model that any Accelerator of this process has sharded: how, and its parameters' names and tree before."""


def note_trees(run: Run, models: Iterable[nn.Module]) -> None:
    """Notes models that are about to be distributed: settings that name parts of models may be meant for any of
    them."""
    for model in models:
        if model not in run.trees:
            before = _sharded_before.get(model)
            run.trees[model] = tree_of(model) if before is None else before.tree


def distributed(run: Run, model: nn.Module, weights: str | Path | None, moves: bool) -> rebind.ParameterNames:
    """Distributes the model, noted before, in place. Returns its parameters' names before. Collective.

    A model that is sharded already with the same settings (before `free_memory`, or by an earlier Accelerator) only
    gets `weights`, where given.
    """
    precision.autocast_forward(model, run.config, run.device)
    names, cut = rebind.ParameterNames.of(model), _cut_of(run)
    is_sharded = run.mesh is not None or run.config.mode == "xla"
    if (before := _sharded_before.get(model)) is not None and before.cut == cut:
        _refuse_added(model, before.names)
        load(run, model, weights)
        names = before.names
    else:
        _distribute(run, model, None if weights is None else Path(weights), moves)
        if is_sharded:
            _sharded_before[model] = _Before(cut, names, run.trees[model])
    if is_sharded:
        save_pretrained.replace(run, model)
    forwards.watch(model, run.region)
    return names


def _distribute(run: Run, model: nn.Module, weights: Path | None, moves: bool) -> None:
    """Distributes the model with the settings that are meant for it. Collective."""
    from shardkit.sharding.parallelize import distribute

    name, tree = type(model).__name__, run.trees[model]
    if run.mesh is not None and not moves:
        log.info("device_placement: no effect on %s: FSDP places its shards.", name)
    config, off = for_one_of(run.config, tree, [other for one, other in run.trees.items() if one is not model])
    if off:
        log.info("%s: off for %s, which has no repeated blocks as the other models have.", " and ".join(off), name)
    distribute(model, config, run.mesh, run.process, weights, moves)
    if run.mesh is not None and run.mesh.size(run.mesh.ndim - 1) > 1:  # else a forward needs no other rank
        evaluations.watch(model, config)


def load(run: Run, model: nn.Module, weights: str | Path | None) -> None:
    """Loads the weights, where given, into a model that is prepared, in place. Collective. Raises ModelError."""
    if weights is not None:
        from shardkit.sharding.parallelize import load_weights

        load_weights(unwrapped(model), run.config, run.process, Path(weights))


@contextmanager
def unsharded(run: Run, models: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, each rank has the models' whole weights for its forwards. Collective at its start. Raises UsageError."""
    from shardkit.sharding import parallelize

    known = [*run.models, *run.evaluated]
    given = [_prepared(model, known) for model in models] or known
    with ExitStack() as entered:
        for model in given:
            entered.enter_context(parallelize.unsharded(model))
        yield


def _prepared(model: nn.Module, known: Iterable[nn.Module]) -> nn.Module:
    """The prepared model that is given, in any wrapper or without. Raises UsageError."""
    for one in known:
        if unwrapped(one) is unwrapped(model):
            return one
    raise UsageError(
        f"accelerator.unsharded: takes prepared models (got a {type(model).__name__}); give it what prepare returned, "
        "or nothing, for all models."
    )


def _cut_of(run: Run) -> Any:
    """What a model's parts depend on: equal values mean that a model is sharded as this run shards it."""
    config, section = run.config, run.config.shardkit
    recomputed = (section.recompute, section.recompute_every, config.xla_fsdp_grad_ckpt)
    dtypes = (precision.of(config), eight_bits(config), section.precision)
    changes = (section.compile, section.offload_activations)
    return dist.group.WORLD, run.mesh, config.mode, config.xla, config.fsdp, recomputed, dtypes, changes


def _refuse_added(model: nn.Module, known: rebind.ParameterNames) -> None:
    """UsageError where parameters were added to a model since it was sharded."""
    added = [
        fqn
        for fqn, parameter in unwrapped(model).named_parameters()
        if id(parameter) not in known.names and not (is_dtensor(parameter) or parameter.device.type == "xla")
    ]
    if added:
        raise UsageError(
            f"prepare: {type(model).__name__} was sharded before, and parameters were added to it since (got "
            f"{first_few(added, 3)}), which would be neither sharded nor reduced over ranks; build a new model "
            "with them, load the weights of this one (accelerator.save_model writes them), and prepare the new model."
        )
