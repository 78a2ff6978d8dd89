"""Models that share parameters with a prepared one."""

from collections.abc import Sequence

from torch import nn

from shardkit.distributed.tensors import every_parameter, layers
from shardkit.errors import UsageError
from shardkit.runtime.run import Run
from shardkit.sharding.original_parameters import ReleasedParameter

_PUT_TOGETHER = (
    "put both into one module (such as nn.ModuleDict) and prepare that: its submodules can be called separately."
)


def refuse_shared(run: Run, models: Sequence[nn.Module]) -> None:
    """UsageError where two models share a parameter: it would be sharded or reduced twice."""
    if run.config.num_processes == 1 and run.config.mode != "fsdp":
        return
    prepared = [*run.models, *(run.evaluated if run.config.mode == "fsdp" else ())]
    seen = {id(p) for known in prepared for p in every_parameter(known)}
    known_ones = [*prepared, *(one for known in run.models for one in layers(known))]
    for model in models:
        if any(model is one for one in known_ones):
            continue
        own = dict(model.named_parameters())
        shared = [fqn for fqn, p in own.items() if id(p) in seen or isinstance(p, ReleasedParameter)]
        if shared:
            trains_more = any(p.requires_grad for fqn, p in own.items() if fqn not in shared)
            raise UsageError(
                f"prepare: two models share {', '.join(shared[:3])}, which can be sharded or reduced only once; "
                + (_PUT_TOGETHER if trains_more else _leave_out(model))
            )
        seen |= {id(p) for p in own.values()}


def _leave_out(model: nn.Module) -> str:
    """For an average that keeps the model it follows as a submodule, and for a part of a prepared model."""
    return (
        f"{type(model).__name__} has no other parameters to train, so do not prepare it: it is called and updated as "
        "it is, without `.module`."
    )
