"""Replicates a model on all ranks, with torch's DistributedDataParallel where it has trainable parameters."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from shardkit.config.schema import Config
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.process import Process, unchecked_group
from shardkit.sharding import precision
from shardkit.sharding.ddp.bucket_views import take_detach
from shardkit.sharding.ddp.names import take_names_of_replicas
from shardkit.sharding.ddp.replica import Replica, ReplicaOfSeveral, replicas
from shardkit.sharding.gradient_sync import GradientMean, sync_with_model, watch_backward

_means: WeakSet[GradientMean] = WeakSet()
"""Of replicated models that had no trainable parameters when they were prepared."""


def replicate(model: nn.Module, config: Config, process: Process) -> nn.Module:
    """The model in DistributedDataParallel; the model itself with one rank, or without trainable parameters yet."""
    if config.mode != "ddp" or process.world_size == 1:
        return model
    may_be_unused, section = config.shardkit.ddp_find_unused_parameters, config.shardkit.ddp
    own = {id(p) for p in every_parameter(model)}
    earlier: list[Replica | GradientMean] = [*replicas, *_means]  # also those that an Accelerator has freed
    for one in earlier:
        one.leave(own)
    if not any(p.requires_grad for p in every_parameter(model)):
        means = GradientMean(every_parameter(model), may_be_unused)
        _means.add(means)
        sync_with_model(model, means)
        watch_backward(model, lambda arrived: means.reduce())
        take_names_of_replicas(model)
        return model
    take_detach()
    is_several = isinstance(model, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    return (ReplicaOfSeveral if is_several else Replica)(
        model,
        precision.of(config).reduce,
        section,
        device_ids=None if process.device.type == "cpu" else [process.device],
        gradient_as_bucket_view=True,
        find_unused_parameters=may_be_unused,
        bucket_cap_mb=section.bucket_cap_mb,
        static_graph=section.static_graph,
        init_sync=False,  # values were synchronized before, or sync_module_states is false
        process_group=unchecked_group(),
    )
