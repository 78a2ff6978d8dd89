"""Models that share parameters with a prepared one."""

from collections.abc import Sequence

from torch import nn

from shardkit.distributed.modules import every_parameter, layers
from shardkit.errors import UsageError
from shardkit.runtime.run import Run
from shardkit.sharding.original_parameters import ReleasedParameter


def refuse_shared(run: Run, models: Sequence[nn.Module]) -> None:
    """UsageError where two models share a parameter: it would be sharded or reduced twice."""
    if run.config.num_processes == 1 and run.config.mode != "fsdp":
        return
    prepared = [*run.models, *(run.evaluated if run.config.mode == "fsdp" else ())]
    seen = {id(p) for known in prepared for p in every_parameter(known)}
    prepared += [one for known in run.models for one in layers(known)]
    for model in models:
        if any(model is one for one in prepared):
            continue
        own = dict(model.named_parameters())
        if shared := [fqn for fqn, p in own.items() if id(p) in seen or isinstance(p, ReleasedParameter)]:
            raise UsageError(
                f"prepare: two models share {', '.join(shared[:3])}, which can be sharded or reduced only once; "
                f"{_advice(model, shared)}"
            )
        seen |= {id(p) for p in own.values()}


def _advice(model: nn.Module, shared: Sequence[str]) -> str:
    """Without more to train it is an average that keeps the model it follows as a submodule, or a part of a prepared
    model."""
    if any(p.requires_grad for fqn, p in model.named_parameters() if fqn not in shared):
        return (
            "put both into one module (such as nn.ModuleDict) and prepare that: its submodules can be called "
            "separately."
        )
    return (
        f"{type(model).__name__} has no other parameters to train, so do not prepare it: it is called and updated as "
        "it is, without `.module`."
    )
