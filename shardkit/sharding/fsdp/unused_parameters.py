"""Parameters that no rank's backward has reached have no gradient, where ranks may use different ones.

FSDP2 then reduces zeros for what a rank has not reached, so that an optimizer would go on with momentum and weight
decay of parameters that nobody uses. In one process, and under DDP, they have no gradient, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardkit.distributed import collectives
from shardkit.distributed.tensors import local_part
from shardkit.sharding.fsdp.internals import has_gradient


def reached(group: Any, before: Sequence[bool] | None) -> list[bool]:
    """For each parameter of the unit, whether this rank's backwards have reached it since it had no gradient. To be
    called before the unit's gradients are reduced. `before`: the answer at the last call; None if `drop` ran since."""
    waits = group._partial_reduce_output is not None
    return [
        has_gradient(p) or ((waits or p.sharded_param.grad is not None) and (before is None or before[number]))
        for number, p in enumerate(group.fsdp_params)
    ]


@torch.no_grad()
def drop(groups: Sequence[Any]) -> None:
    """Sets the gradients to None that no rank has reached, unless they wait for more micro-batches. Collective."""
    groups = [group for group in groups if group.fsdp_params]
    if not groups or not all(group.reduce_grads and group.all_reduce_grads for group in groups):
        return
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    is_used = _are_used_here(groups, parameters)
    for group in groups:
        group._reached = None
    if is_used.untyped_storage().device.type == "meta":  # that of a fake tensor: a plan has no values
        return
    if collectives.world_size() > 1:
        dist.all_reduce(is_used, dist.ReduceOp.MAX)
    for parameter, used in zip(parameters, is_used.tolist(), strict=True):
        if not used:
            parameter.sharded_param.grad = None


def _are_used_here(groups: Sequence[Any], parameters: Sequence[Any]) -> torch.Tensor:
    """For each parameter of the groups, 1 where this rank has a gradient of its own, else 0: (parameters,)."""
    flags = [flag for group in groups for flag in group._reached or [True] * len(group.fsdp_params)]
    found = torch.tensor(flags, dtype=torch.int32, device=groups[0].device)
    for number, parameter in enumerate(parameters):
        if not flags[number] and (gradient := parameter.sharded_param.grad) is not None:
            found[number] = local_part(gradient).any()  # that of a penalty on the sharded parameter
    return found
