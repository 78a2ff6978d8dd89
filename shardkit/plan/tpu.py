"""Translates a request for TPUs into FSDP or DDP, for which memory and traffic are computed."""

from dataclasses import replace
from typing import Any

from shardkit.config import xla
from shardkit.config.meaning import dtypes
from shardkit.config.schema import Config, DistributedType, ShardingStrategy
from shardkit.errors import ConfigError
from shardkit.model.tree import ModuleNode
from shardkit.plan.answer import PlanRequest

NOTE = "PyTorch/XLA schedules its own collectives: buffers and traffic are those of torch's FSDP."


def as_planned(request: PlanRequest) -> PlanRequest:
    """The request; for TPUs, with the FSDP or DDP configuration that keeps the same on each device.

    Raises ConfigError, with all reasons, if PyTorch/XLA has no counterpart for a setting.
    """
    config = request.config
    if config.mode != "xla":
        return request
    if problems := xla.problems(config):
        raise ConfigError("\n".join(problems))
    description = replace(request.description, notes=(*request.description.notes, NOTE))
    if config.downcast_bf16:
        description = replace(description, tree=_in_bf16(description.tree))
    return replace(request, config=_without_xla(config), description=description, is_on_tpu=True)


def _without_xla(config: Config) -> Config:
    strategy = config.fsdp.sharding_strategy if xla.shards(config) else ShardingStrategy.NO_SHARD
    return config.changed(
        distributed_type=DistributedType.FSDP,
        fsdp={"sharding_strategy": strategy, "activation_checkpointing": xla.recomputes(config)},
        mixed_precision="no",
        shardkit={"precision": _dtypes(config)},
    )


def _dtypes(config: Config) -> dict[str, Any]:
    """Dtypes. With `downcast_bf16`, parameters, gradients and optimizer state are in bf16, without casts."""
    if config.downcast_bf16:
        return {"param_dtype": None, "reduce_dtype": "bf16"}
    return {"param_dtype": dtypes(config).param}


def _in_bf16(node: ModuleNode) -> ModuleNode:
    parameters = tuple(replace(p, dtype="bfloat16") if p.dtype == "float32" else p for p in node.parameters)
    buffers = tuple(replace(b, dtype="bfloat16") if b.dtype == "float32" else b for b in node.buffers)
    return replace(node, parameters=parameters, buffers=buffers, children=tuple(map(_in_bf16, node.children)))
